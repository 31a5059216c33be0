"""Verdict on a head from its statistics, in one word."""

from __future__ import annotations

import math
from typing import Literal

Verdict = Literal["localised", "sink", "diffuse", "healthy", "borderline", "undefined"]

LOCALISED_BELOW, HEALTHY_FROM, HEALTHY_TO, DIFFUSE_ABOVE = 0.5, 0.6, 0.8, 0.85
"""GTD ranges of the paper."""
SINK_FROM = 0.5
"""From this share of all attention on one token a head is a sink."""
COLLAPSED_BELOW = 0.1
"""Below this share of the largest possible entropy rows attend to single tokens."""

ALARMING: frozenset[Verdict] = frozenset({"localised", "sink", "diffuse", "undefined"})


def verdict(gtd: float, *, entropy_share: float | None = None, sink_mass: float | None = None) -> Verdict:
    """Judge a head by its GTD, entropy and sink mass.

    Attention that repeats itself (A A = A) has the same high GTD whether it is uniform, a single sink or the
    diagonal. So a head most of whose attention lands on one token is a ``sink``, and one whose rows have
    hardly any entropy (``entropy_share`` of the largest possible) is ``localised``; the rest follows the
    paper's ranges.
    """
    if not all(math.isfinite(value) for value in (gtd, entropy_share or 0.0, sink_mass or 0.0)):
        return "undefined"
    if sink_mass is not None and sink_mass >= SINK_FROM:
        return "sink"
    if gtd < LOCALISED_BELOW or (entropy_share is not None and entropy_share < COLLAPSED_BELOW):
        return "localised"
    if gtd > DIFFUSE_ABOVE:
        return "diffuse"
    return "healthy" if HEALTHY_FROM <= gtd <= HEALTHY_TO else "borderline"


def largest_entropy(tokens: float, *, causal: bool) -> float:
    """Mean row entropy in nats of a text of so many tokens if every row were uniform over what it may see."""
    if causal:
        return math.lgamma(tokens + 1) / tokens
    return math.log(tokens)

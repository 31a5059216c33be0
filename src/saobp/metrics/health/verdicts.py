"""Verdict on a head from its statistics, in one word, and whether a model is trained at all."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

from saobp.metrics.health.uniform_map import full_odds

Verdict = Literal["localised", "sink", "diffuse", "healthy", "borderline", "undefined"]

LOCALISED_BELOW, HEALTHY_FROM, HEALTHY_TO, DIFFUSE_ABOVE = 0.5, 0.6, 0.8, 0.85
"""GTD ranges of the paper, for attention without a causal mask."""
SINK_FROM = 0.5
"""From this share of all attention on one token, beyond what a uniform map sends there, a head is a sink."""
COLLAPSED_BELOW = 0.1
"""Below this share of the largest possible entropy rows attend to single tokens."""
SPREAD_FROM, EVEN_ABOVE = 0.7, 0.9
"""A head of high GTD is diffuse from the first share of the largest entropy; above the second any head is."""

ALARMING: frozenset[Verdict] = frozenset({"localised", "sink", "diffuse", "undefined"})


def verdict(
    gtd: float,
    *,
    entropy_share: float | None = None,
    sink_mass: float | None = None,
    uniform_gtd: float | None = None,
    uniform_sink: float = 0.0,
) -> Verdict:
    """Judge a head by its GTD, entropy and sink mass, compared with the uniform map under the same mask.

    ``entropy_share`` is that of the uniform map's entropy; ``uniform_gtd`` and ``uniform_sink`` are its GTD
    and sink mass, by default those of a long text without a causal mask. A head most of whose attention lands
    on one token is a ``sink``, one whose rows have hardly any entropy is ``localised``, one whose rows have
    nearly all is ``diffuse``. The rest follows the paper's ranges, whose upper limits move with the uniform
    map. A high GTD without much entropy comes from paths that meet in a few tokens: such a head is
    ``borderline``.
    """
    if not all(math.isfinite(value) for value in (gtd, entropy_share or 0.0, sink_mass or 0.0)):
        return "undefined"
    if sink_mass is not None and uniform_sink < 1:
        beyond_uniform = (sink_mass - uniform_sink) / (1 - uniform_sink)
        if beyond_uniform >= SINK_FROM:
            return "sink"
    if gtd < LOCALISED_BELOW or (entropy_share is not None and entropy_share < COLLAPSED_BELOW):
        return "localised"
    healthy_to, diffuse_above = upper_limits(uniform_gtd)
    spread = 1.0 if entropy_share is None else entropy_share
    if (entropy_share is not None and spread > EVEN_ABOVE) or (gtd > diffuse_above and spread >= SPREAD_FROM):
        return "diffuse"
    return "healthy" if HEALTHY_FROM <= gtd <= healthy_to else "borderline"


def upper_limits(uniform_gtd: float | None = None) -> tuple[float, float]:
    """GTD up to which a head is healthy, and above which it is diffuse, beside a uniform map of that GTD.

    Both are fixed shares of the uniform map's odds of indirect to direct paths, those that 0.8 and 0.85 are
    without a mask. The lower limits tell local habits, which a mask does not change.
    """
    if uniform_gtd is None or not 0 < uniform_gtd < 1:
        return HEALTHY_TO, DIFFUSE_ABOVE
    scale = _odds(uniform_gtd) / full_odds()
    healthy_to, diffuse_above = (
        scale * _odds(limit) / (1 + scale * _odds(limit)) for limit in (HEALTHY_TO, DIFFUSE_ABOVE)
    )
    return healthy_to, diffuse_above


def _odds(share: float) -> float:
    return share / (1 - share)


def is_untrained(model: nn.Module) -> bool:
    """Whether every bias and every weight of a norm is constant, as initialised; no training leaves them so.

    A model without such parameters, or whose parameters are on other devices, counts as trained.
    """
    vectors = [one.detach() for one in model.parameters() if one.ndim == 1 and one.numel() > 1]
    return bool(vectors) and all(bool((one == one[0]).all()) for one in vectors)

"""Verdict on a head from its statistics, in one word, and whether a model is trained at all.

The scale of verdicts is the uniform map, whose rows attend alike to all that they may see. A causal mask
raises GTD and sink mass whatever a head does: early rows have few tokens to choose from, and paths of several
hops end at the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from saobp.metrics.functional.gtd import BETA, HOPS

TABULATED = 1024
"""Up to so many tokens the numbers of a causal map are computed row by row, beyond by their growth."""


class UniformMap(NamedTuple):
    """GTD, mean row entropy in nats and sink mass of the uniform maps of some texts, ``[texts]`` each."""

    gtd: Tensor
    entropy: Tensor
    sink: Tensor


def uniform_map(tokens: Tensor, *, causal: bool, beta: float = BETA, hops: int = HOPS) -> UniformMap:
    """Of texts with so many tokens each, ``[texts]``, under a causal mask or none; without a device sync."""
    tokens = tokens.to(torch.float32 if tokens.device.type == "mps" else torch.float64).clamp(min=1)
    if not causal:
        odds = full_odds(beta, hops)
        return UniformMap(torch.full_like(tokens, odds / (1 + odds)), tokens.log(), 1 / tokens)
    indirect_norms, direct_norms = (part.to(tokens) for part in _causal_norms(beta, hops))
    index = tokens.clamp(max=TABULATED).long() - 1
    beyond = (tokens / TABULATED).clamp(min=1).log()
    growth = TABULATED * (indirect_norms[-1] - indirect_norms[-2])
    indirect = indirect_norms[index] + growth * beyond
    direct = direct_norms[index] + beyond
    entropy = torch.lgamma(tokens + 1) / tokens
    return UniformMap(indirect / (direct + indirect), entropy, direct / tokens)


def full_odds(beta: float = BETA, hops: int = HOPS) -> float:
    """Squared norm of G over that of A for the uniform map without a mask, which is idempotent (A A = A)."""
    return math.fsum(beta ** (hop - 1) for hop in range(2, hops + 1)) ** 2


@lru_cache(maxsize=8)
def _causal_norms(beta: float, hops: int) -> tuple[Tensor, Tensor]:
    """Squared norms of G and of A for the uniform causal map of 1, 2, .. TABULATED tokens.

    A row of A^(t+1) is the mean of the rows of A^t up to it, so one pass over rows gives all lengths.
    """
    sums = torch.zeros(hops - 1, TABULATED, dtype=torch.float64)
    weights = torch.tensor([beta ** (hop - 1) for hop in range(2, hops + 1)], dtype=torch.float64)
    rows = []
    for row in range(TABULATED):
        power = torch.zeros(TABULATED, dtype=torch.float64)
        power[: row + 1] = 1 / (row + 1)
        total = torch.zeros_like(power)
        for hop, weight in enumerate(weights):
            sums[hop] += power
            power = sums[hop] / (row + 1)
            total += weight * power
        rows.append(total.square().sum())
    direct = (1 / torch.arange(1, TABULATED + 1, dtype=torch.float64)).cumsum(0)
    return torch.stack(rows).cumsum(0), direct


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


def judged(
    values: Mapping[str, float | None],
    uniform_gtd: float | None = None,
    largest_entropy: float | None = None,
    uniform_sink: float = 0.0,
) -> Verdict:
    """:func:`verdict` of a head's statistics by name, beside the uniform map's; undefined without GTD."""
    gtd, entropy = values.get("gtd"), values.get("attention_entropy")
    if gtd is None:
        return "undefined"
    is_known = entropy is not None and largest_entropy is not None and largest_entropy > 0
    return verdict(
        gtd,
        entropy_share=entropy / largest_entropy if is_known else None,  # type: ignore[operator]
        sink_mass=values.get("sink_mass"),
        uniform_gtd=uniform_gtd,
        uniform_sink=uniform_sink,
    )


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
    vectors = [
        parameter.detach()
        for parameter in model.parameters()
        if parameter.ndim == 1 and parameter.numel() > 1
    ]
    return bool(vectors) and all(bool((parameter == parameter[0]).all()) for parameter in vectors)

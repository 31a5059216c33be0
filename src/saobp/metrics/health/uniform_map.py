"""Statistics of the uniform map, whose rows attend alike to all that they may see: the scale of verdicts.

A causal mask raises GTD and sink mass whatever a head does: early rows have few tokens to choose from, and
paths of several hops end at the first ones.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

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
    place = tokens.clamp(max=TABULATED).long() - 1
    beyond = (tokens / TABULATED).clamp(min=1).log()
    growth = TABULATED * (indirect_norms[-1] - indirect_norms[-2])
    indirect = indirect_norms[place] + growth * beyond
    direct = direct_norms[place] + beyond
    entropy = torch.lgamma(tokens + 1) / tokens
    return UniformMap(indirect / (direct + indirect), entropy, direct / tokens)


def full_odds(beta: float = BETA, hops: int = HOPS) -> float:
    """Squared norm of G over that of A for the uniform map without a mask, which repeats itself: A A = A."""
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

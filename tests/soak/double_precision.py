"""Refined attention once more, in double precision and by the formulas as printed: products of messages, no
running sums, no fused terms. It calls nothing of the library, so it can be wrong only in its own way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """What an update needs.

    prior, beliefs and visible ``[batch, heads, row, key]``; speaks ``[batch, 1, row, 1]`` is False for
    padding; hears ``[row, other row]``; gamma ``[heads, 1, 1]``.
    """

    prior: Tensor
    beliefs: Tensor
    visible: Tensor
    speaks: Tensor
    hears: Tensor
    gamma: Tensor


def attention_in_double(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    factor: str,
    strength: Tensor,
    steps: int = 1,
    damping: float = 0.0,
    real: Tensor | None = None,
    is_causal: bool = False,
    paper: bool = False,
    scale: float,
) -> Tensor:
    """query ``[batch, heads, length, dim]``, key and value with as many heads or fewer.

    strength ``[heads]``, real ``[batch, length]``. A row that sees no key gives zeros.
    """
    query, key, value, strength = (part.double() for part in (query, key, value, strength))
    groups = query.shape[1] // key.shape[1]
    key, value = (torch.stack([part] * groups, 2).flatten(1, 2) for part in (key, value))
    batch, heads, length, _ = query.shape
    real = torch.ones(batch, length, dtype=torch.bool) if real is None else real
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    visible = real[:, None, None, :].expand(batch, heads, length, length)
    visible = visible & earlier if is_causal else visible

    scores = torch.einsum("bhid,bhjd->bhij", query, key) * scale
    prior = _normalised((scores - _row_maxima(scores, visible)).exp(), visible)

    others = ~torch.eye(length, dtype=torch.bool)
    if factor.endswith("key-bias"):
        others = torch.ones_like(others)
    hears = others & earlier if is_causal and not paper else others
    speaks = real[:, None, :, None]
    sign = -1.0 if factor.startswith("low") else 1.0
    gamma = -torch.expm1(-sign * strength)[:, None, None]

    beliefs = prior
    for _ in range(steps):
        updated = _update(factor, Rows(prior, beliefs, visible, speaks, hears, gamma))
        beliefs = updated if steps == 1 else (1 - damping) * updated + damping * beliefs
    return torch.einsum("bhij,bhjd->bhid", beliefs, value)


def _update(factor: str, rows: Rows) -> Tensor:
    if factor == "none":
        return rows.prior
    if factor.startswith("elemmul"):
        alike = torch.einsum("bhik,bhjk->bhij", rows.beliefs, rows.beliefs)
        return _normalised(alike * rows.prior if factor == "elemmul-prior" else alike, rows.visible)
    log_messages = (1 - rows.gamma * rows.beliefs).log().masked_fill(~rows.speaks, 0.0)
    if factor.endswith("listing"):
        return _normalised(rows.prior * (-log_messages).exp(), rows.visible)
    told = torch.einsum("ji,bhik->bhjk", rows.hears.double(), log_messages)
    log_beliefs = rows.prior.clamp(min=1e-320).log() + told
    return _normalised((log_beliefs - _row_maxima(log_beliefs, rows.visible)).exp(), rows.visible)


def _row_maxima(values: Tensor, visible: Tensor) -> Tensor:
    seen = values.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
    return torch.where(seen.isfinite(), seen, 0.0).detach()


def _normalised(weights: Tensor, visible: Tensor) -> Tensor:
    kept = torch.where(visible, weights, 0.0)
    return kept / kept.sum(-1, keepdim=True).clamp(min=1e-300)

"""How attention is spread: entropies of rows and of indirect paths, sparsity, and the weight of a sink."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from saobp.metrics.functional.gtd import BETA, HOPS, check_path, indirect_paths
from saobp.metrics.functional.maps import Maps, checked_maps


def attention_entropy(attention: Tensor | Maps, *, padding_mask: Tensor | None = None) -> Tensor:
    """Mean entropy of the real rows in nats, ``[..., length, length]`` to ``[...]``; differentiable."""
    maps = checked_maps(attention, padding_mask)
    return maps.mean_over_rows(row_entropy(maps.rows))


def indirect_entropy(
    attention: Tensor | Maps, *, beta: float = BETA, hops: int = HOPS, padding_mask: Tensor | None = None
) -> Tensor:
    """Mean entropy in nats of the real rows of G, each normalised; differentiable. See ``gtd`` for G."""
    check_path(beta, hops)
    maps = checked_maps(attention, padding_mask)
    return maps.mean_over_rows(normalised_entropy(indirect_paths(maps.rows, beta, hops)))


def sparsity(
    attention: Tensor | Maps, *, threshold: float | None = None, padding_mask: Tensor | None = None
) -> Tensor:
    """Share of entries between real tokens that lie below ``threshold`` (default: 1 / real tokens).

    Entries hidden by a causal mask are zero and count as sparse. Those of a uniform row are not below the
    default, despite rounding. Not differentiable.
    """
    if threshold is not None and not (isinstance(threshold, Real) and 0 <= threshold <= 1):
        raise ValueError(f"threshold must lie from 0 to 1, not {threshold!r}")
    maps = checked_maps(attention, padding_mask)
    rounding = 32 * torch.finfo(maps.rows.dtype).eps
    limit = (1 - rounding) / maps.tokens[..., None, None] if threshold is None else threshold
    below = maps.rows < limit
    if maps.real is not None:
        below = below & maps.real.unsqueeze(-1) & maps.real.unsqueeze(-2)
    return below.to(maps.rows.dtype).sum((-2, -1)) / maps.tokens**2


def sink_mass(attention: Tensor | Maps, *, padding_mask: Tensor | None = None) -> Tensor:
    """Largest column mean over real rows: the share of all attention on the most attended token."""
    maps = checked_maps(attention, padding_mask)
    return maps.rows.sum(-2).amax(-1) / maps.tokens


def row_entropy(rows: Tensor) -> Tensor:
    """Entropy of each row, ``[..., length]``; an entry of zero adds nothing and has a finite gradient."""
    return -(rows * rows.clamp(min=torch.finfo(rows.dtype).tiny).log()).sum(-1)


def normalised_entropy(weights: Tensor) -> Tensor:
    """Entropy of each row divided by its sum, ``[..., length]``; 0 for rows of zeros, which are padding.

    With the sum s, it is log s - sum(w log w) / s: the divided rows are never formed.
    """
    total = weights.sum(-1)
    safe = total.masked_fill(total == 0, 1.0)
    return (safe.log() + row_entropy(weights) / safe).clamp(min=0)

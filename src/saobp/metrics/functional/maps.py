"""Attention maps, validated and with padding zeroed: the input of every exact statistic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saobp.arguments import read_zeros_and_ones


class Maps(NamedTuple):
    """Maps that are known to be stochastic.

    rows:   ``[..., length, length]`` in at least single precision; zero in rows and columns of padding
    real:   ``[..., length]``, True for real tokens, broadcastable to the rows; None means all
    tokens: ``[...]``, real tokens per map, broadcastable to the maps
    """

    rows: Tensor
    real: Tensor | None
    tokens: Tensor

    def mean_over_rows(self, values: Tensor) -> Tensor:
        """Mean over real rows of ``values [..., length]``, which must be zero for padding."""
        return values.sum(-1) / self.tokens


def unchecked_maps(attention: Tensor, padding_mask: Tensor | None = None) -> Maps:
    """Maps from attention that is stochastic by construction: values are not checked, so no device sync."""
    rows = attention.to(torch.promote_types(attention.dtype, torch.float32))
    if padding_mask is None:
        return Maps(rows, None, torch.tensor(float(rows.shape[-1]), dtype=rows.dtype, device=rows.device))
    groups = [1] * (attention.ndim - padding_mask.ndim - 1)
    real = padding_mask.view(*padding_mask.shape[:-1], *groups, padding_mask.shape[-1])
    rows = rows.masked_fill(~(real.unsqueeze(-1) & real.unsqueeze(-2)), 0.0)
    return Maps(rows, real, real.sum(-1).to(rows.dtype))


def checked_maps(attention: Tensor | Maps, padding_mask: Tensor | None = None) -> Maps:
    """Maps from any tensor, or as they are. Raises if a tensor is not a stochastic map.

    attention ``[..., length, length]``; padding_mask ``[batch, length]`` (``[length]`` for a single map),
    True or 1 for real tokens, where batch is the first dimension.
    """
    if isinstance(attention, Maps):
        return attention
    _check_shape(attention)
    if padding_mask is not None:
        padding_mask = read_zeros_and_ones("padding_mask", padding_mask)
        _check_padding(attention, padding_mask)
    maps = unchecked_maps(attention, padding_mask)
    with torch.no_grad():
        _check_values(maps, attention.dtype)
    return maps


def _check_shape(attention: Tensor) -> None:
    if not isinstance(attention, Tensor) or not attention.is_floating_point():
        kind = attention.dtype if isinstance(attention, Tensor) else type(attention).__name__
        raise ValueError(f"attention must be a floating-point tensor, not {kind}")
    if attention.ndim < 2 or attention.shape[-1] != attention.shape[-2] or attention.shape[-1] == 0:
        raise ValueError(
            f"attention must be [..., length, length] with at least one token, not {tuple(attention.shape)}"
        )


def _check_padding(attention: Tensor, padding_mask: Tensor) -> None:
    shape = (*attention.shape[: min(1, attention.ndim - 2)], attention.shape[-1])
    if tuple(padding_mask.shape) != shape:
        raise ValueError(f"padding_mask must have shape {shape}, not {tuple(padding_mask.shape)}")
    if not bool(padding_mask.any(-1).all()):
        raise ValueError("padding_mask leaves a map without any real token")


def _check_values(maps: Maps, dtype: torch.dtype) -> None:
    sums = maps.rows.sum(-1)
    if not bool(torch.isfinite(sums).all()):
        raise ValueError("attention holds NaN or infinite values")
    if bool((maps.rows < 0).any()):
        raise ValueError("attention holds negative values: pass probabilities, not scores")
    away = (sums - 1).abs()
    if maps.real is not None:
        away = away.masked_fill(~maps.real, 0.0)
    worst = float(away.max()) if away.numel() else 0.0
    if worst > row_tolerance(dtype):
        raise ValueError(
            f"every row of attention must sum to 1 over real tokens, but one is off by {worst:.2g}: "
            "pass probabilities from before dropout, and no weight on padding"
        )


def row_tolerance(dtype: torch.dtype) -> float:
    """How far the sum of a row of this type may be from 1."""
    return 1e-3 if torch.finfo(dtype).bits >= 32 else 2e-2

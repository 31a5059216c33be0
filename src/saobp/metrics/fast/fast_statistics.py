"""Statistics of softmax rows in one sweep over queries and keys: fused on a GPU, in tiles elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from saobp.arguments import check_numbers, check_states, read_padding, require_tensors
from saobp.propagation.beliefs import without_autocast
from saobp.propagation.row_statistics import RowMask, RowSums, row_sums
from saobp.refinement import check_count

FAST = ("max_logit", "attention_entropy", "sink_share", "sink_share_first_k", "sink_share_by_norm")
FIRST = 4
"""First tokens of a text counted by ``sink_share_first_k``."""


def fast_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    padding_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    first: int = FIRST,
) -> dict[str, Tensor]:
    """FAST statistics of the softmax rows between query and key, each ``[batch, heads]`` in float32.

    query ``[batch, heads, queries, dim]``, key and value ``[batch, key_heads, keys, dim]``; rows are the last
    of the keys, so a call with a cache has fewer of them. padding_mask ``[batch, keys]``, True for real
    tokens. ``window``: a row sees fewer than so many keys back, and as many forward if not causal. Without
    value there is no ``sink_share_by_norm``. Memory is linear in length, and there is no gradient.
    """
    value_or_key = key if value is None else value
    require_tensors(query=query, key=key, value=value_or_key)
    check_states(query, key, value_or_key)
    check_numbers(is_causal, 0.0, scale)
    queries, keys = query.shape[-2], key.shape[-2]
    if not query.numel() or not key.numel():
        raise ValueError(f"statistics need at least one text and one token, not shape {tuple(query.shape)}")
    if is_causal and queries > keys:
        raise ValueError(f"causal rows are the last of the keys, so {queries} of {keys} cannot be")
    if window is not None:
        check_count("window", window)
    check_first(first)
    padding = read_padding(None, padding_mask, (query.shape[0], keys), query.device)
    if padding is not None and not bool(padding[:, -queries:].any(-1).all()):
        raise ValueError("padding_mask leaves a text without any real token")
    mask = padded_rows(padding, queries, causal=is_causal, window=window)
    statistics = statistics_of(
        sweep(query, key, value, mask, query.shape[-1] ** -0.5 if scale is None else scale, first)
    )
    names = FAST if value is not None else FAST[:-1]
    return {name: statistics[..., FAST.index(name)] for name in names}


def check_first(first: int) -> None:
    if not isinstance(first, int) or not 1 <= first <= 64:
        raise ValueError(f"first must be between 1 and 64 tokens, not {first!r}")


def sweep(
    query: Tensor, key: Tensor, value: Tensor | None, mask: RowMask, scale: float, first: int = FIRST
) -> RowSums:
    """``row_sums`` by the kernel where it can."""
    with torch.no_grad():
        if query.is_cuda:
            from saobp.kernels.statistics.launch import can_sweep, sweep_rows

            if can_sweep(query, key, scale):
                return sweep_rows(query, key, value, mask, scale=scale, first=first)
        with without_autocast(query.device.type):
            return row_sums(query, key, value, mask, scale=scale, first=first)


def statistics_of(row_totals: RowSums) -> Tensor:
    """FAST statistics from sums over rows, ``[batch, heads, 5]``; NaN where the states are."""
    top, sums = row_totals.whole()
    means = sums[..., :4] / sums[..., 4:].clamp(min=1)
    top = torch.where(means[..., 0].isnan() & (top != float("inf")), float("nan"), top)
    return torch.cat([top[..., None], means], -1)


def padded_rows(padding: Tensor | None, queries: int, *, causal: bool, window: int | None) -> RowMask:
    """The mask of the last ``queries`` rows of texts with a padding mask ``[batch, keys]``."""
    if padding is None:
        return RowMask(causal, window)
    return RowMask(causal, window, padding, padding[:, -queries:], padding.int().argmax(-1).int())

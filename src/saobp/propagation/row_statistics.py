"""Statistics of softmax rows from queries and keys, tile by tile: the specification of the fused sweep.

Rows are the plain softmax, before any refinement. No tensor is as large as rows times keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE_BYTES = 32 * 2**20
TEMPORARIES = 4
"""Tensors of a tile's size that are alive at a time."""


@dataclass(frozen=True)
class RowMask:
    """What each row sees; row i stands at position keys - queries + i.

    window:    a row sees fewer than so many keys back, and as many forward if not causal
    real_keys: bool ``[batch, keys]``; real_rows: bool ``[batch, queries]``, others do not count
    starts:    int32, first key of the text ``[batch]``, or of each row's own text ``[batch, queries]``
    ends:      int32 ``[batch, queries]``, the key after the last of each row's own text
    entries:   ``[batch or 1, heads or 1, queries or 1, keys]``: 0 or False hides; of floating point it is
               added to the scores, and its lowest values hide
    """

    causal: bool = False
    window: int | None = None
    real_keys: Tensor | None = None
    real_rows: Tensor | None = None
    starts: Tensor | None = None
    ends: Tensor | None = None
    entries: Tensor | None = None

    @property
    def kind(self) -> int:
        """0 without entries, 1 if they only hide, 2 if they are added to the scores."""
        return 0 if self.entries is None else 2 if self.entries.is_floating_point() else 1

    @property
    def lowest_bias(self) -> float:
        """Entries down to this value hide their key."""
        return torch.finfo(self.entries.dtype).min / 2 if self.kind == 2 else 0.0  # type: ignore[union-attr]


class RowSums(NamedTuple):
    """Over the real rows of each head, in blocks of them: the largest score, and sums.

    top:  ``[batch, heads, blocks]``, -inf without a row
    sums: ``[batch, heads, blocks, 5]``: entropy, weight of the first key, of the first k, of the first by the
          norms of values (its share of all weights times norms), and the number of rows
    """

    top: Tensor
    sums: Tensor

    def whole(self) -> RowSums:
        """As a single block, ``[batch, heads]`` and ``[batch, heads, 5]``."""
        return RowSums(self.top.amax(-1), self.sums.sum(-2))


def row_sums(
    query: Tensor, key: Tensor, value: Tensor | None, mask: RowMask, *, scale: float, first: int
) -> RowSums:
    """query ``[batch, heads, queries, dim]``; key and value with a divisor of its heads; ``first`` is k.

    Without value the fourth sum is 0.
    """
    batch, heads, queries, _ = query.shape
    key_heads, keys = key.shape[1:3]
    precision = torch.promote_types(query.dtype, torch.float32)
    key, query = key.to(precision), query.to(precision) * scale
    norms = None if value is None else torch.linalg.vector_norm(value, dim=-1, dtype=precision)
    if norms is not None:
        norms = norms.repeat_interleave(heads // key_heads, 1)
    top = query.new_full((batch, heads), float("-inf"))
    sums = query.new_zeros(batch, heads, 5)
    step = max(1, TILE_BYTES // (TEMPORARIES * batch * heads * keys * precision.itemsize))
    for begin in range(0, queries, step):
        rows = torch.arange(begin, min(begin + step, queries), device=query.device)
        stop = min(keys, keys - queries + begin + step) if mask.causal else keys
        grouped = query[:, :, rows].unflatten(1, (key_heads, -1)).flatten(2, 3)
        scores = (grouped @ key[:, :, :stop].mT).view(batch, heads, len(rows), stop)
        seen = _seen(mask, rows, keys, queries)[..., :stop]
        if mask.kind == 2:
            scores = scores + _entry_rows(mask, rows)[..., :stop]
        scores = scores.masked_fill(~seen, float("-inf"))
        highest = scores.amax(-1)
        is_counted = seen.any(-1).expand(batch, heads, -1)
        if mask.real_rows is not None:
            is_counted = is_counted & mask.real_rows[:, None, rows]
        logs = (scores - scores.logsumexp(-1, keepdim=True)).masked_fill(~seen, 0.0)
        weights = logs.exp() * seen
        entropy = -(weights * logs).sum(-1)
        starts = _starts(mask, rows)
        first_keys = (starts[..., None] + torch.arange(first, device=query.device)).long()
        is_visible = first_keys < stop
        first_keys = first_keys.clamp(max=stop - 1)[:, None].expand(batch, heads, len(rows), first)
        first_weights = weights.gather(-1, first_keys) * is_visible[:, None]
        share = torch.zeros_like(entropy)
        if norms is not None:
            first_norms = norms.gather(-1, first_keys[..., 0])
            total = (weights @ norms[:, :, :stop, None])[..., 0]
            share = torch.where(total > 0, first_weights[..., 0] * first_norms / total, 0.0)
        parts = torch.stack(
            [entropy, first_weights[..., 0], first_weights.sum(-1), share, torch.ones_like(entropy)], -1
        )
        sums += torch.where(is_counted[..., None], parts, 0.0).sum(-2)
        top = torch.maximum(top, highest.masked_fill(~is_counted, float("-inf")).amax(-1))
    return RowSums(top[..., None], sums[..., None, :])


def _seen(mask: RowMask, rows: Tensor, keys: int, queries: int) -> Tensor:
    """Which keys the given rows see, bool ``[batch or 1, heads or 1, rows, keys]``."""
    columns = torch.arange(keys, device=rows.device)
    distance = keys - queries + rows[:, None] - columns
    seen = torch.ones_like(distance, dtype=torch.bool)[None, None]
    if mask.causal:
        seen = seen & (distance >= 0)
    if mask.window is not None:
        seen = seen & (distance.abs() < mask.window)
    if mask.ends is not None:
        starts = _starts(mask, rows)[:, None, :, None]
        seen = seen & (columns >= starts) & (columns < mask.ends[:, None, rows, None])
    if mask.real_keys is not None:
        seen = seen & mask.real_keys[:, None, None, :]
    if mask.entries is not None:
        entries = _entry_rows(mask, rows)
        seen = seen & (entries > mask.lowest_bias if mask.kind == 2 else entries != 0)
    return seen


def _starts(mask: RowMask, rows: Tensor) -> Tensor:
    """First key of each row's text, ``[batch or 1, rows or 1]``."""
    if mask.starts is None:
        return rows.new_zeros(1, len(rows))
    return mask.starts[:, None].expand(-1, len(rows)) if mask.ends is None else mask.starts[:, rows]


def _entry_rows(mask: RowMask, rows: Tensor) -> Tensor:
    assert mask.entries is not None
    return mask.entries if mask.entries.shape[-2] == 1 else mask.entries[:, :, rows]

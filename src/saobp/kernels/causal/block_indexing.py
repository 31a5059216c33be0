"""Strict causal attention: where blocks of keys and rows meet, and where their sums lie."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_walk(key_start, span_start, span_stop, tokens, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Where a block of keys meets the rows of a span: start of its EDGE tiles, their end, end of full tiles, stop.

    Rows before ``key_start`` cannot see the block; EDGE tiles cross the diagonal; full tiles lie under it and end
    where the sequence leaves less than a whole tile. So of three legs the first and the last are EDGE tiles.
    """
    stop = min(span_stop, tokens)
    start = min(max(span_start, key_start // ROWS * ROWS), stop)
    full = min(max(start, tl.cdiv(key_start + KEYS, ROWS) * ROWS), stop)
    return start, full, max(full, stop // ROWS * ROWS), stop


@triton.jit
def key_walk(row_start, tokens, ROWS: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr):
    """Where a block of rows meets keys, start and stop: in full tiles, or in EDGE tiles, which cross the diagonal."""
    edge = row_start // KEYS * KEYS
    if EDGE:
        return edge, min(row_start + ROWS, tokens)
    else:
        return 0, edge


@triton.jit
def slot_place(slot, span_start, length, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """Where the sums for a block of a span's rows begin, the block's number in the span being ``slot``.

    Rows see no keys after the block, so each block's sums are longer by a block than those before.
    Packed sequences lie side by side, as in their states, and take whole lines.
    """
    slot = slot.to(tl.int64)
    if PACKED:
        return slot * length
    else:
        return slot * span_start + slot * (slot + 1) // 2 * ROWS

# mypy: ignore-errors
"""Strict causal attention: tile ranges of a block of keys or rows, and offsets of their sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_walk(key_start, span_start, span_stop, tokens, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Row range of a block of keys within a span: start of its EDGE tiles, their end, end of full tiles, stop.

    Rows before ``key_start`` cannot see the block; EDGE tiles cross the diagonal; full tiles are below it and end
    before the sequence's partial tile. Of the three ranges the first and the last are EDGE tiles.
    """
    stop = min(span_stop, tokens)
    start = min(max(span_start, key_start // ROWS * ROWS), stop)
    full = min(max(start, tl.cdiv(key_start + KEYS, ROWS) * ROWS), stop)
    return start, full, max(full, stop // ROWS * ROWS), stop


@triton.jit
def key_walk(row_start, tokens, ROWS: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr):
    """Key range of a block of rows, start and stop: of full tiles, or of EDGE tiles, which cross the diagonal."""
    edge = row_start // KEYS * KEYS
    if EDGE:
        return edge, min(row_start + ROWS, tokens)
    else:
        return 0, edge


@triton.jit
def slot_place(slot, span_start, length, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """Offset in ``past`` (and ``later``) of the numbers of a span's block of rows, of which ``slot`` are before it.

    Rows see no keys after their block, so each block has numbers for one block of keys more than the one before it.
    Packed sequences are adjacent, as in their states, and every block has numbers for the full length.
    """
    slot = slot.to(tl.int64)
    if PACKED:
        return slot * length
    else:
        return slot * span_start + slot * (slot + 1) // 2 * ROWS

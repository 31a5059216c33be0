# mypy: ignore-errors
"""Offsets of a program's work: its block, head and sequence, the head's states and its per-row vectors."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(pid, blocks, heads, length, cu_ptr, PACKED: tl.constexpr):
    """Block, batch row, head, first token and number of tokens of the sequence that program ``pid`` works on.

    PACKED: sequences follow one another in one batch row; else the first token is 0 and there are ``length``.
    """
    block = pid % blocks
    head = (pid // blocks) % heads
    sequence = pid // blocks // heads
    if PACKED:
        first = tl.load(cu_ptr + sequence)
        tokens = tl.load(cu_ptr + sequence + 1) - first
        return block, sequence * 0, head, first, tokens
    return block, sequence, head, sequence * 0, length


@triton.jit
def locate_sorted(blocks, section, heads, length, cu_ptr, PACKED: tl.constexpr):
    """As ``locate``, plus the line (head of a sequence), for blocks whose work falls with their number (causal).

    Longest first: of each ``section`` lines, all first blocks come before all second ones. So programs that run at once take
    equally long, a section ends with short ones, and the states of its lines stay in the L2 cache.
    """
    pid = tl.program_id(0)
    part = pid // (section * blocks)
    lines = tl.minimum(section, tl.num_programs(0) // blocks - part * section)
    place = pid - part * section * blocks
    block, line = place // lines, part * section + place % lines
    _, batch, head, first, tokens = locate(line, 1, heads, length, cu_ptr, PACKED)
    return block, batch, head, first, tokens, line


@triton.jit
def states_base(base, batch, head, first, batch_stride, head_stride, row_stride):
    """``base``, a pointer or 0, plus the offset of a head's states in a sequence, which may exceed 2^31."""
    batch, first = batch.to(tl.int64), first.to(tl.int64)
    return base + (batch * batch_stride + head.to(tl.int64) * head_stride) + first * row_stride


@triton.jit
def states_of(tensor_map, ptr, batch, head, first, batch_stride, head_stride, row_stride):
    """States of a head as ``fetch_tile`` takes them: TMA descriptor (or a dummy), base pointer, batch row, head and row stride."""
    base = states_base(ptr, batch, head, first, batch_stride, head_stride, row_stride)
    return tensor_map, base, batch, head, row_stride


@triton.jit
def head_base(base, batch, head, first, heads, length):
    """``base`` plus the offset of a head's rows in vectors ``[batch, heads, length]``."""
    return base + (batch.to(tl.int64) * heads + head) * length + first.to(tl.int64)


@triton.jit
def mask_base_of(mask_ptr, batch, length):
    """Pointer to the padding mask of a sequence."""
    return mask_ptr + batch.to(tl.int64) * length


@triton.jit
def row_bases(mask_ptr, batch, head, first, heads, length):
    """Offset of a head's rows in vectors, and pointer to the padding mask of its sequence."""
    return head_base(0, batch, head, first, heads, length), mask_base_of(mask_ptr, batch, length)


@triton.jit
def tile_walk(tokens, SIZE: tl.constexpr):
    """Bounds of the whole tiles, from 0, and the end of the sequence. Kernels loop from ``walk[TAIL]`` to ``walk[TAIL + 1]``."""
    return 0, tokens // SIZE * SIZE, tokens

# mypy: ignore-errors
"""Prefetch of states into the L2 cache: kernels for short sequences are bound by memory latency."""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import INTERPRETED
from saobp.kernels.library.indexing import locate, states_base

AHEAD = tl.constexpr(132)
"""Prefetch distance in programs: the number of multiprocessors of an H200.

There it takes 2048 heads of 128 tokens forward from 0.058 to 0.0555 ms, strict causal ones from 0.065 to 0.061; two or three
times the distance is slower than no prefetch, and so, by 4 %, are backward passes with prefetch."""


@triton.jit
def prefetch_rows(base, tokens, stride, ROWS: tl.constexpr):
    """Prefetches the first 128 bytes, a cache line, of each of ``tokens`` rows: 64 numbers of a half type."""
    if not INTERPRETED:
        places = tl.arange(0, ROWS)
        addresses = (base + places * stride).to(tl.int64)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p prefetch.global.L2 [$1]; mov.b32 $0, $2; }", "=r,l,r,r",
            [addresses, places, tokens], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def prefetch_for_later_program(
    base, batch_stride, head_stride, row_stride, heads, group, length, ROWS: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """``prefetch_rows`` of the head that the program AHEAD programs later works on; nothing if sequences are PACKED."""
    if not PACKED:
        later = tl.program_id(0) + AHEAD
        _, batch, head, first, tokens = locate(later, 1, heads, length, base, PACKED)
        real = tl.where(later < tl.num_programs(0), tokens, 0)
        states = states_base(base, batch, head // group, first, batch_stride, head_stride, row_stride)
        prefetch_rows(states, real, row_stride, ROWS)

# mypy: ignore-errors
"""Numbers of rows and keys of a head, for ``whole_map_backward``: from memory to shared memory, where both sweeps find them.

Vectors in shared memory are ``[blocks, rows of a block]``: log-sum-exp, gamma (0 for rows that send no message), n, D, and of
keys their factors and a bound, minus infinity for padding.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saobp.kernels.bidirectional.short_weak import real_or
from saobp.kernels.hopper.head_tiles import COLUMNS, DIM, narrow_layout, product_layout
from saobp.kernels.library.arithmetic import INTERPRETED
from saobp.kernels.library.gluon_names import reinterpret
from saobp.kernels.library.packed_bf16 import rounded

KEYS = tl.constexpr(256)
PREFETCH = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, $2; }")


@gluon.jit
def all_blocks(vector):
    """The numbers of all blocks of rows."""
    return reinterpret(vector, gl.float32, [KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_row_numbers(lse_ptr, inverse_ptr, message_sums_ptr, row_base, rows, length, exists):
    """Log-sum-exp, one over the normaliser, and as keys the log-message sums; of no row and no key where there is none."""
    there = (rows < length) & exists
    high = gl.load(lse_ptr + row_base + rows, mask=there, other=float("inf"))
    inverse = gl.load(inverse_ptr + row_base + rows, mask=there, other=0.0)
    message_sums = gl.load(message_sums_ptr + row_base + rows, mask=there, other=float("-inf"))
    return high, inverse, message_sums


@gluon.jit
def store_numbers(
    vectors, parts, o, g, numbers, gamma, mask_base, length, GAPS: tl.constexpr, MASKED: tl.constexpr
):
    """What both sweeps need of rows and keys, in shared memory: dO times n, rounded, in place of dO, and D of that, also in two
    parts, as an operand. Returns the keys' factors.
    """
    WARPS: tl.constexpr = gl.num_warps()
    states: tl.constexpr = product_layout(DIM, WARPS)
    narrow: tl.constexpr = narrow_layout(WARPS)
    highs, gammas, inverses, deltas, weights, bounds = vectors
    high, inverse, message_sums = numbers
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, states))
    scaled = rounded(g.load(states).to(gl.float32) * inverse[:, None], g.dtype)
    g.store(scaled)
    delta = gl.sum(o.load(states).to(gl.float32) * scaled.to(gl.float32), 1)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, narrow))[None, :]
    exact = gl.convert_layout(delta, gl.SliceLayout(1, narrow))[:, None]
    near = exact.to(parts.dtype)
    left = (exact - near.to(gl.float32)).to(parts.dtype)
    parts.store(gl.where(column == 0, near, gl.where(column == 1, left, 0.0)))
    if GAPS:
        gamma *= real_or(mask_base, rows, length, 1.0, 0.0, MASKED)
        all_blocks(bounds).store(real_or(mask_base, rows, length, float("inf"), float("-inf"), MASKED))
    else:
        gamma = gl.full([KEYS], 0.0, gl.float32, gl.SliceLayout(1, states)) + gamma
    weight = gl.exp2(message_sums)
    all_blocks(highs).store(high)
    all_blocks(gammas).store(gamma)
    all_blocks(inverses).store(inverse)
    all_blocks(deltas).store(delta)
    all_blocks(weights).store(weight)
    return weight


@gluon.jit
def prefetch_row_numbers(lse_ptr, inverse_ptr, message_sums_ptr, row_base, rows, length, exists):
    """Brings what ``load_row_numbers`` will load into the level 2 cache."""
    there = (rows < length) & exists
    prefetch(lse_ptr + row_base + rows, there)
    prefetch(inverse_ptr + row_base + rows, there)
    prefetch(message_sums_ptr + row_base + rows, there)


@gluon.jit
def prefetch(pointers, there):
    """Brings numbers into the level 2 cache."""
    if not INTERPRETED:
        operands = [pointers.to(gl.int64), there.to(gl.int32)]
        gl.inline_asm_elementwise(PREFETCH, "=r,l,r", operands, gl.int32, False, 1)

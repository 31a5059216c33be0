# mypy: ignore-errors
"""Device functions of ``causal_forward``: messages and weights of a tile, and what is stored of rows and keys."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saobp.kernels.bidirectional.short_weak import real_or
from saobp.kernels.hopper.head_tiles import COLUMNS, add_row_sums, narrow_layout, product_layout
from saobp.kernels.hopper.tile_ring import KEYS
from saobp.kernels.library.arithmetic import head_seed, kept
from saobp.kernels.library.gluon_names import reinterpret
from saobp.kernels.library.packed_bf16 import pair_logarithm

LOWEST_ROWS = tl.constexpr(64)
"""Rows of which the smallest normaliser is recorded, as by ``weak_output``."""
WEAK_MESSAGES = tl.constexpr(
    "{ .reg .f32 x, y; .reg .b32 e, t, z; ex2.approx.ftz.f32 x, $1; ex2.approx.ftz.f32 y, $2;"
    " cvt.rn.f16x2.f32 e, y, x; mov.b32 z, 0x80008000;"
    " fma.rn.f16x2 t, e, $4, $3; fma.rn.f16x2 t, e, t, z; fma.rn.f16x2 $0, e, t, e; }"
)
MESSAGES = tl.constexpr(
    "{ .reg .f32 x, y; ex2.approx.ftz.f32 x, $3; ex2.approx.ftz.f32 y, $4;"
    " fma.rn.f32 x, x, $5, 0f3F800000; fma.rn.f32 y, y, $6, 0f3F800000;"
    " lg2.approx.ftz.f32 $1, x; lg2.approx.ftz.f32 $2, y; cvt.rn.f16x2.f32 $0, $2, $1; }"
)
NOT_LATER = tl.constexpr("{ .reg .pred p; setp.gt.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p; }")
"""A score, or minus infinity if the key is later. In assembly, since the compiler would keep a tile of comparisons."""
_WEIGHTS = "{ .reg .f32 x, y; ex2.approx.ftz.f32 x, $1; ex2.approx.ftz.f32 y, $2; cvt.rn.KIND.f32 $0, y, x; }"
WEIGHTS_BF16 = tl.constexpr(_WEIGHTS.replace("KIND", "bf16x2"))
WEIGHTS_F16 = tl.constexpr(_WEIGHTS.replace("KIND", "f16x2"))


@gluon.constexpr_function
def vector_layout(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def messages_of(scores, message, PRECISE: tl.constexpr):
    """Log messages in float16, in units of ``message_unit``, from scores ``[keys, rows]`` relative to the rows' log-sum-exp.

    Also their sums over rows, of rounded messages where the backward pass subtracts those.
    """
    if PRECISE == 0:
        unit, slope, bend = pair_logarithm(message)
        operands = [scores, slope, bend]
        sent = gl.inline_asm_elementwise(WEAK_MESSAGES, "=r,f,f,r,r", operands, gl.float16, True, 2)
        none = gl.full([KEYS, COLUMNS], 0.0, gl.float32, narrow_layout(gl.num_warps()))
        by_key: tl.constexpr = gl.SliceLayout(1, product_layout(scores.shape[1], gl.num_warps()))
        return sent, gl.convert_layout(gl.max(add_row_sums(sent, none), 1), by_key) * unit
    else:
        sent, exact = gl.inline_asm_elementwise(
            MESSAGES, "=&r,=&f,=&f,f,f,f,f", [scores, -message[0]], (gl.float16, gl.float32), True, 2
        )
        return sent, gl.sum(exact, 1)


@gluon.jit
def rounded_weights(beliefs, KIND: tl.constexpr):
    """2^beliefs in KIND."""
    if KIND.is_fp16():
        return gl.inline_asm_elementwise(WEIGHTS_F16, "=r,f,f", [beliefs], gl.float16, True, 2)
    else:
        return gl.inline_asm_elementwise(WEIGHTS_BF16, "=r,f,f", [beliefs], gl.bfloat16, True, 2)


@gluon.jit
def shown(raw, keys, rows, mask_base, length, EDGE: tl.constexpr, MASKED: tl.constexpr):
    """Products of a tile; minus infinity for later keys, in an EDGE tile, and for padding. Keys and rows are shaped to broadcast."""
    if EDGE:
        raw = gl.inline_asm_elementwise(NOT_LATER, "=f,f,r,r", [raw, keys, rows], gl.float32, True, 1)
    if MASKED:
        raw = gl.minimum(raw, real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED))
    return raw


@gluon.jit
def store_triangle(triangle, unit):
    """``unit`` where the first row is earlier than the second, else 0."""
    ROWS: tl.constexpr = triangle.shape[0]
    layout: tl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    earlier = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
    triangle.store(gl.where(earlier < rows, unit, 0.0).to(gl.float16))


@gluon.jit
def store_past(past, base, length):
    """Stores the sums of all messages about each key, and begins anew with zeros."""
    layout: tl.constexpr = vector_layout(gl.num_warps())
    keys = gl.arange(0, past.shape[0], layout)
    gl.store(base + keys, past.load(layout), mask=keys < length)
    past.store(gl.full([past.shape[0]], 0.0, gl.float32, layout))


@gluon.jit
def store_rest(base, out, rows, length, KIND: tl.constexpr, TAIL: tl.constexpr):
    """Stores what rounding a block of the output ``[rows, DIM]`` to KIND leaves, in ``[length, DIM]``."""
    WIDTH: tl.constexpr = out.shape[1]
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, product_layout(KEYS, gl.num_warps())))
    rest = out - out.to(KIND).to(gl.float32)
    pointers = base + (rows[:, None] * WIDTH + dims[None, :])
    if TAIL:
        gl.store(pointers, rest.to(KIND), mask=(rows < length)[:, None])
    else:
        gl.store(pointers, rest.to(KIND))


@gluon.jit
def store_lowest(memory, base, block, blocks, ROWS: tl.constexpr):
    """Stores the smallest normaliser of every LOWEST_ROWS rows; returns that of all.

    Each warp takes all rows: no reduction across warps.
    """
    PARTS: tl.constexpr = ROWS // LOWEST_ROWS
    spread: tl.constexpr = gl.BlockedLayout([1, 2 * PARTS], [PARTS, 32 // PARTS], [gl.num_warps(), 1], [1, 0])
    rows = reinterpret(memory, gl.float32, [PARTS, LOWEST_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    places = block * PARTS + gl.arange(0, PARTS, gl.SliceLayout(1, spread))
    lowest = gl.min(rows.load(spread), 1)
    gl.store(base + places, lowest, mask=places < blocks)
    return gl.min(lowest, 0)


@gluon.jit
def dropped(weights, rows, tile, seed_ptr, row_base, drop_threshold, DROPS: tl.constexpr):
    """Weights ``[rows, keys]`` of a tile after dropout, but for the factor of those kept."""
    if DROPS:
        operand: tl.constexpr = gl.DotOperandLayout(0, product_layout(KEYS, gl.num_warps()), 2)
        keys = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, operand))
        rows = gl.convert_layout(rows, gl.SliceLayout(1, operand))
        seed = head_seed(seed_ptr, row_base, DROPS)
        weights = gl.where(kept(seed, rows[:, None], keys[None, :], drop_threshold), weights, 0.0)
    return weights


@gluon.jit
def needs_care(lowest_base, lowest_blocks, lowest_sum, BLOCKS: tl.constexpr):
    """1 if a row of the head has a smaller normaliser than ``lowest_sum``, else 0."""
    places = gl.arange(0, BLOCKS, vector_layout(gl.num_warps()))
    lowest = gl.load(lowest_base + places, mask=places < lowest_blocks, other=1.0)
    return gl.where(gl.min(lowest, 0) < lowest_sum, 1, 0)

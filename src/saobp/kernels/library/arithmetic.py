# mypy: ignore-errors
"""Device functions shared by the kernels: messages, loads, dropout.

Everything is in base-2 logarithms, because the hardware's exponential is 2^x.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from saobp.refinement import MAX_STRENGTH as _MAX_STRENGTH

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether Triton's interpreter runs the kernels: it has no inline assembly."""

MAX_STRENGTH = tl.constexpr(_MAX_STRENGTH)


@triton.jit
def _hardware_log2(x):
    """log2(x) in one instruction; tl.log2 takes several more for subnormals, which messages never are."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _hardware_inverse(x):
    """1 / x in one instruction, to about one unit in the last place."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2):
    """A head's ``message``: gamma = 1 - e^(-sign strength), and coefficients of polynomials in the prior weight a.

    r0, r1, r2: 1 / (1 - gamma a) = r0 + r1 a + r2 a^2; l0, l1, l2: log2(1 - gamma a) = a (l0 + l1 a + l2 a^2). Those given are for
    gamma a in the place of a (``CallSpec.message_numbers``); 0 where no kernel uses polynomials.
    """
    strength = tl.load(strength_ptr + head).to(tl.float32) * sign
    strength = tl.minimum(tl.maximum(strength, -MAX_STRENGTH), MAX_STRENGTH)
    # For weak strengths the difference would cancel, so a series is used.
    series = strength * (
        1.0 - strength / 2 * (1.0 - strength / 3 * (1.0 - strength / 4 * (1.0 - strength / 5)))
    )
    gamma = tl.where(tl.abs(strength) < 0.05, series, 1.0 - tl.exp2(-1.4426950408889634 * strength))
    square = gamma * gamma
    return gamma, r0, r1 * gamma, r2 * square, l0 * gamma, l1 * square, l2 * square * gamma


@triton.jit
def log2_message(a, message, PRECISE: tl.constexpr):
    """log2(1 - gamma a). PRECISE 0: a polynomial, for weak gamma; 1: the hardware's logarithm; 2: full float32."""
    gamma, r0, r1, r2, l0, l1, l2 = message
    if PRECISE == 0:
        return a * (l0 + a * (l1 + a * l2))
    if PRECISE == 1:
        return _hardware_log2(1.0 - gamma * a)
    # 1 - x is rounded; scaling by x over its rounded value corrects that.
    x = gamma * a
    m = 1.0 - x
    moved = 1.0 - m
    return tl.where(
        moved == 0.0, x * -1.4426950408889634, tl.log2(m) * (x / tl.where(moved == 0.0, 1.0, moved))
    )


@triton.jit
def inverse_message(a, message, PRECISE: tl.constexpr):
    """1 / (1 - gamma a), by a polynomial if PRECISE is 0."""
    gamma, r0, r1, r2, l0, l1, l2 = message
    if PRECISE == 0:
        return r0 + a * (r1 + a * r2)
    if PRECISE == 1:
        return _hardware_inverse(1.0 - gamma * a)
    return 1.0 / (1.0 - gamma * a)


_OVER_MESSAGE = tl.constexpr(
    "{ .reg .f32 s, t, u, w, p, q, r;"
    " fma.rn.f32 s, $4, $8, 0f3F800000; fma.rn.f32 t, $5, $9, 0f3F800000;"
    " fma.rn.f32 u, $6, $10, 0f3F800000; fma.rn.f32 w, $7, $11, 0f3F800000;"
    " mul.f32 p, s, t; mul.f32 q, u, w; mul.f32 r, p, q; rcp.approx.ftz.f32 r, r;"
    " mul.f32 q, r, q; mul.f32 p, r, p;"
    " mul.f32 t, q, t; mul.f32 s, q, s; mul.f32 w, p, w; mul.f32 u, p, u;"
    " mul.f32 $0, $4, t; mul.f32 $1, $5, s; mul.f32 $2, $6, w; mul.f32 $3, $7, u; }"
)
_OVER_REGISTERS = tl.constexpr("=&f,=&f,=&f,=&f" + ",f" * 8)


@triton.jit
def over_message(e, slope):
    """e / (1 - slope e), ``slope`` shaped to broadcast, for any strength. Four entries share a reciprocal: the range of
    float32 holds products of four messages."""
    if INTERPRETED:
        return e / (1.0 - slope * e)
    else:
        operands = [e, tl.broadcast_to(-slope, e.shape)]
        return tl.inline_asm_elementwise(_OVER_MESSAGE, _OVER_REGISTERS, operands, tl.float32, True, 4)


@triton.jit
def divided_by_message(a, message, PRECISE: tl.constexpr):
    """a / (1 - gamma a)."""
    if PRECISE == 1:
        return over_message(a, message[0])
    return a * inverse_message(a, message, PRECISE)


@triton.jit
def relative(raw, high, low, score_scale, PRECISE: tl.constexpr):
    """Base-2 scores minus the row's log-sum-exp, from raw products Q K^T.

    PRECISE 2: the log-sum-exp has two parts, the row's largest raw product and the log2 of the sum relative to it, because the
    sum of both would lose the digits that matter; otherwise ``high`` is all of it.
    """
    if PRECISE == 2:
        return (raw - high) * score_scale - low
    return raw * score_scale - high


@triton.jit
def finite(top):
    """A maximum that can be subtracted: 0 where it is minus infinity, that of a row that sees no key."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def raise_maximum(top, scores):
    """Online softmax: the rows' running maximum ``[rows]`` after a tile of scores ``[rows, keys]``.

    Also the maximum to subtract (finite), and the factor that rescales sums so far to it.
    """
    raised = tl.maximum(top, tl.max(scores, 1))
    anchor = finite(raised)
    return raised, anchor, tl.exp2(top - anchor)


@triton.jit
def load_lse(lse_base, low_plane, rows, tokens, PRECISE: tl.constexpr, TAIL: tl.constexpr):
    """Both parts of the rows' log-sum-exp; beyond the sequence plus infinity, which makes weights 0."""
    high = load_vector(lse_base, rows, tokens, float("inf"), TAIL)
    if PRECISE == 2:
        low = load_vector(lse_base + low_plane, rows, tokens, 0.0, TAIL)
    else:
        low = tl.zeros_like(high)
    return high, low


@triton.jit
def load_rows(
    base,
    start,
    tokens,
    stride,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Tile ``[ROWS, BLOCK_DIM]`` of states from row ``start`` on; 0 beyond the head size and, if TAIL, from row ``tokens`` on."""
    local = tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    pointers = base + tl.cast(stride, tl.int64) * start + (local * stride + dims)
    if TAIL and DIM != BLOCK_DIM:
        return tl.load(pointers, mask=(start + local < tokens) & (dims < DIM), other=0.0)
    if TAIL:
        return tl.load(pointers, mask=start + local < tokens, other=0.0)
    if DIM != BLOCK_DIM:
        return tl.load(pointers, mask=dims < DIM, other=0.0)
    return tl.load(pointers)


@triton.jit
def fetch_tile(
    states, start, tokens,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """As ``load_rows``, of ``states`` as ``states_of`` returns them. MAPPED: by TMA, which saves registers and pads with zeros."""
    tensor_map, base, batch, head, stride = states
    if MAPPED:
        return tl.reshape(tensor_map.load([batch, head, start, 0]), [ROWS, BLOCK_DIM])
    else:
        return load_rows(base, start, tokens, stride, ROWS, DIM, BLOCK_DIM, TAIL)


@triton.jit
def store_rows(
    base, start, tokens, stride, values, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Stores a tile ``[ROWS, BLOCK_DIM]`` from row ``start`` on, without what is beyond the head size or the sequence."""
    local = tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    pointers = base + tl.cast(stride, tl.int64) * start + (local * stride + dims)
    tl.store(pointers, values.to(base.dtype.element_ty), mask=(start + local < tokens) & (dims < DIM))


@triton.jit
def load_vector(base, places, tokens, other, TAIL: tl.constexpr):
    """One number per position, ``other`` beyond the sequence."""
    if TAIL:
        return tl.load(base + places, mask=places < tokens, other=other)
    return tl.load(base + places)


@triton.jit
def load_or_zero(base, places, tokens, TAIL: tl.constexpr, NEEDED: tl.constexpr):
    """``load_vector`` with 0 beyond the sequence; zeros, with nothing read, if not NEEDED."""
    return load_vector(base, places, tokens if NEEDED else 0, 0.0, TAIL or not NEEDED)


@triton.jit
def load_anchor(base, rows, tokens, TAIL: tl.constexpr, CAREFUL: tl.constexpr):
    """The number that each row's logarithms are relative to; zeros, with nothing read, unless CAREFUL."""
    if CAREFUL:
        return load_vector(base, rows, tokens, 0.0, TAIL)
    else:
        return tl.zeros_like(rows).to(tl.float32)


@triton.jit
def real_tokens(mask_ptr, places, tokens, MASKED: tl.constexpr):
    """Which positions hold real tokens: inside the sequence and, if there is a mask, not padding."""
    if MASKED:
        return tl.load(mask_ptr + places, mask=places < tokens, other=0) != 0
    return places < tokens


@triton.jit
def head_seed(seed_ptr, row_base, DROPS: tl.constexpr):
    """Dropout seed of one head, from the call's seed and the offset of the head's rows; 0 without dropout."""
    if DROPS:
        return _scramble(tl.load(seed_ptr).to(tl.uint32) ^ _scramble(row_base.to(tl.uint32)))
    else:
        return tl.zeros([], tl.uint32)


@triton.jit
def kept(seed, rows, columns, threshold):
    """Dropout mask of a tile: True with probability 1 - threshold / 2^32. A hash of seed, row and key, so every kernel makes the same."""
    return _scramble(_scramble(seed + rows.to(tl.uint32)) + columns.to(tl.uint32)) >= threshold.to(tl.uint32)


@triton.jit
def head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS: tl.constexpr):
    """Dropout of one head, as ``drop`` takes it: its seed, the threshold of ``kept``, and the factor of weights that are kept."""
    return head_seed(seed_ptr, row_base, DROPS), drop_threshold, keep_scale


@triton.jit
def drop(weights, dropout, rows, keys, DROPS: tl.constexpr):
    """Weights of a tile, 0 where dropped; those kept are not scaled. ``rows`` and ``keys`` broadcast to the tile."""
    if DROPS:
        weights = tl.where(kept(dropout[0], rows, keys, dropout[1]), weights, 0.0)
    return weights


@triton.jit
def drop_scaled(weights, dropout, rows, keys, DROPS: tl.constexpr):
    """As ``drop``, with kept weights scaled: weights after dropout, or their gradient back through it."""
    if DROPS:
        weights = tl.where(kept(dropout[0], rows, keys, dropout[1]), weights * dropout[2], 0.0)
    return weights


@triton.jit
def _scramble(x):
    """A 32-bit integer hash of two multiplications with near-perfect avalanche."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)

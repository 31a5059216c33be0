# mypy: ignore-errors
"""What ElemMul subtracts before it rounds: means of heads, and of each key the geometric mean of its weights.

In a nearly uniform head the scores' gradient depends only on differences of weights, which are little larger than
their rounding errors. So the products over rows are taken of weights minus a number u_k per key (``mean_weight``):

    sum_j w_jk x_j - (sum_j w_jk) mean(x) = sum_j (w_jk - u_k) x_j - (sum_j w_jk - rows u_k) mean(x)

u_k is the geometric mean of the key's weights, which needs no sweep: their logarithms are scores minus log-sum-exps,
so it follows from the mean query and the mean log-sum-exp (``level``). It is never above the arithmetic mean, so it costs no head
any digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import load_lse, load_rows, load_vector, real_tokens
from saobp.kernels.library.indexing import head_base, locate, mask_base_of, states_base


@triton.jit
def value_centres(
    v_ptr, q_ptr, mask_ptr, cu_ptr, lse_ptr, centre_ptr, q_centre_ptr, level_ptr,
    v_batch, v_head, v_row, q_batch, q_head, q_row,
    heads, group, length, low_plane, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Means over a head's real rows in float32: of values (``centre``) and queries; ``level``: mean log-sum-exp, number of real rows."""
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    lse_base = head_base(lse_ptr, batch, head, first, heads, length)
    mask_base = mask_base_of(mask_ptr, batch, length)
    values = tl.zeros([BLOCK_DIM], tl.float32)
    queries = tl.zeros([BLOCK_DIM], tl.float32)
    level = tl.zeros([ROWS], tl.float32)
    count = tl.zeros([ROWS], tl.int32)
    for begin in tl.range(0, tokens, ROWS):
        rows = begin + tl.arange(0, ROWS)
        real = real_tokens(mask_base, rows, tokens, MASKED)
        v = load_rows(v_base, begin, tokens, v_row, ROWS, DIM, BLOCK_DIM, True).to(tl.float32)
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, True).to(tl.float32)
        high, low = load_lse(lse_base, low_plane, rows, tokens, PRECISE, True)
        if PRECISE == 2:
            high = high * score_scale + low
        values += tl.sum(tl.where(real[:, None], v, 0.0), 0)
        queries += tl.sum(tl.where(real[:, None], q, 0.0), 0)
        level += tl.where(real, high, 0.0)
        count += real.to(tl.int32)
    total = tl.sum(count, 0)
    divisor = tl.maximum(total, 1)
    places = tl.program_id(0) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    tl.store(centre_ptr + places, values / divisor)
    tl.store(q_centre_ptr + places, queries / divisor)
    tl.store(level_ptr + 2 * tl.program_id(0), tl.sum(level, 0) / divisor)
    tl.store(level_ptr + 2 * tl.program_id(0) + 1, total.to(tl.float32))


@triton.jit
def gradient_centres(
    grad_ptr, mask_ptr, cu_ptr, inverse_ptr, d_centre_ptr, d_level_ptr,
    g_batch, g_head, g_row,
    heads, length,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Mean of a head's dO over all rows (``d_centre``), and of log2(1 / z) over its real rows (``d_level``)."""
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    inverse_base = head_base(inverse_ptr, batch, head, first, heads, length)
    mask_base = mask_base_of(mask_ptr, batch, length)
    total = tl.zeros([BLOCK_DIM], tl.float32)
    level = tl.zeros([ROWS], tl.float32)
    count = tl.zeros([ROWS], tl.int32)
    for begin in tl.range(0, tokens, ROWS):
        rows = begin + tl.arange(0, ROWS)
        real = real_tokens(mask_base, rows, tokens, MASKED)
        total += tl.sum(load_rows(base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, True).to(tl.float32), 0)
        inverse = load_vector(inverse_base, rows, tokens, 1.0, True)
        level += tl.log2(tl.where(real, inverse, 1.0))
        count += real.to(tl.int32)
    places = tl.program_id(0) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    tl.store(d_centre_ptr + places, total / tl.maximum(tokens, 1))
    tl.store(d_level_ptr + tl.program_id(0), tl.sum(level, 0) / tl.maximum(tl.sum(count, 0), 1))


@triton.jit
def load_centre(centre_ptr, blocks, BLOCK_DIM: tl.constexpr):
    """The mean ``[1, BLOCK_DIM]`` of this program's head."""
    return tl.load(centre_ptr + tl.program_id(0) // blocks * BLOCK_DIM + tl.arange(0, BLOCK_DIM))[None, :]


@triton.jit
def geometric_mean(k, q_centre_ptr, level_ptr, blocks, score_scale, BLOCK_DIM: tl.constexpr):
    """Geometric mean of each key's A over real rows, ``[keys]``."""
    raw = tl.sum(k.to(tl.float32) * load_centre(q_centre_ptr, blocks, BLOCK_DIM), 1)
    return tl.exp2(raw * score_scale - tl.load(level_ptr + 2 * (tl.program_id(0) // blocks)))


@triton.jit
def count_real(level_ptr, blocks):
    """Number of real rows of this program's head."""
    return tl.load(level_ptr + 2 * (tl.program_id(0) // blocks) + 1)


@triton.jit
def with_digits_of(x, dtype: tl.constexpr):
    """float32 rounded to the digits, not the range, of a half type: where a weight is 0, what is subtracted is not rounded again."""
    dropped: tl.constexpr = 13 if dtype == tl.float16 else 16
    bits = x.to(tl.int32, bitcast=True) + (1 << (dropped - 1))
    return (bits & -(1 << dropped)).to(tl.float32, bitcast=True)


@triton.jit
def power_below(x):
    """Largest power of two at most x, for x >= 0."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)

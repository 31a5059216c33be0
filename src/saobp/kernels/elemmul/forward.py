# mypy: ignore-errors
"""Bidirectional ElemMul without forming A A^T: attention applied twice, in memory linear in length.

Row i of the normalised A A^T reaches the values through the keys. With n_k = sum_j A_jk over real rows j,

    G_k = sum_j (A_jk / n_k) V_j                mean value of the rows that attend to key k
    O_i = sum_k (A_ik n_k / z_i) G_k            with z_i = sum_k A_ik n_k

Both weights sum to one, so G and O stay within the range of V in any precision. G is stored in the precision of V minus the
mean of V (``centre``): in nearly uniform heads rows of G differ little, and the gradient of the scores depends on these
differences only. For the same reason weights are rounded after subtracting their key's geometric mean, see ``centering.py``.
In the code ``gathered`` is G and ``received`` n. ``row_sums`` of ``bidirectional/sums.py`` and ``value_centres`` come first;
then ``gathered_values`` over keys and ``elemmul_output`` over rows.

Two rows that share no key have similarity FLOOR, as in the specification. It matters to padding rows only:
a real row is similar to itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.sums import raw_scores
from saobp.kernels.elemmul.centering import (
    count_real,
    geometric_mean,
    load_centre,
    power_below,
    with_digits_of,
)
from saobp.kernels.library.arithmetic import (
    load_lse,
    load_rows,
    load_vector,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.library.indexing import locate, row_bases, states_base, tile_walk

FLOOR = tl.constexpr(2.0**-103)
"""Smallest similarity: float32's tiny / eps, as in ``propagation/factors.py``."""

NOTHING = tl.constexpr(2.0**-120)
"""Below this a column's sum counts as 0: it affects no row, not even one at FLOOR."""


@triton.jit
def _anchor(weights, top):
    """Online maximum of weights, for the range of float16: the largest so far as a power of two, and the factor for sums so far.

    Powers of two, so that scaling is exact.
    """
    raised = tl.maximum(top, power_below(tl.max(weights, 1)))
    return raised, top / raised


@triton.jit
def _gather_loop(
    out, total, top, mean_weight, k, q_base, q_row, v_base, v_row, mask_base, lse_base, low_plane,
    start, stop, tokens, score_scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr, ANCHORED: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for begin in tl.range(start, stop, ROWS):
        rows = begin + tl.arange(0, ROWS)
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(lse_base, low_plane, rows, tokens, PRECISE, TAIL)
        if MASKED:
            real = real_tokens(mask_base, rows, tokens, MASKED)
            high = tl.where(real, high, float("inf"))
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        a = tl.exp2(relative(raw, high[None, :], low[None, :], score_scale, PRECISE))
        total += tl.sum(a, 1)
        subtracted = mean_weight
        if ANCHORED:
            top, shrink = _anchor(a, top)
            a *= (1.0 / top)[:, None]
            subtracted *= 1.0 / top
            out *= shrink[:, None]
        if MASKED:
            a -= subtracted[:, None] * real.to(tl.float32)[None, :]
        else:
            a -= subtracted[:, None]
        v = load_rows(v_base, begin, tokens, v_row, ROWS, DIM, BLOCK_DIM, TAIL)
        out = tl.dot(a.to(v.dtype), v, out, input_precision=PRECISION)
    return out, total, top


@triton.jit
def gathered_values(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, lse_ptr, centre_ptr, q_centre_ptr, level_ptr, gathered_ptr, received_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, m_batch, m_head, m_row,
    heads, group, length, blocks, low_plane, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, ANCHORED: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """G of a block of keys, centred, and n: how much attention each receives from real rows. Padding keys get 0."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    out = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    total = tl.zeros([KEYS], tl.float32)
    mean_weight = geometric_mean(k, q_centre_ptr, level_ptr, blocks, score_scale, BLOCK_DIM)
    mean_weight = with_digits_of(mean_weight, v_ptr.dtype.element_ty)
    if ANCHORED:
        top = tl.maximum(power_below(mean_weight), NOTHING)
    else:
        top = tl.full([KEYS], 1.0, tl.float32)
    walk = tile_walk(tokens, ROWS)
    for TAIL in tl.static_range(2):
        out, total, top = _gather_loop(
            out, total, top, mean_weight, k, q_base, q_row, v_base, v_row, mask_base, lse_ptr + row_base, low_plane,
            walk[TAIL], walk[TAIL + 1], tokens, score_scale, ROWS, DIM, BLOCK_DIM, TAIL, ANCHORED, PRECISE, MASKED, PRECISION,
        )  # fmt: skip
    attended = real_tokens(mask_base, keys, tokens, MASKED) & (total > NOTHING)
    inverse = 1.0 / tl.where(attended, total, 1.0)
    excess = (total - count_real(level_ptr, blocks) * mean_weight) * inverse
    out = out * (top * inverse)[:, None] - excess[:, None] * load_centre(centre_ptr, blocks, BLOCK_DIM)
    out = tl.where(attended[:, None], out, 0.0)
    gathered_base = states_base(gathered_ptr, batch, head, first, m_batch, m_head, m_row)
    store_rows(gathered_base, block * KEYS, tokens, m_row, out, KEYS, DIM, BLOCK_DIM)
    tl.store(received_ptr + row_base + keys, tl.where(attended, total, 0.0), mask=keys < tokens)


@triton.jit
def _output_loop(
    out, total, top, q, high, low, k_base, k_row, gathered_base, m_row, mask_base, received_base,
    start, stop, tokens, score_scale,
    KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr, ANCHORED: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for begin in tl.range(start, stop, KEYS):
        keys = begin + tl.arange(0, KEYS)
        k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        real = real_tokens(mask_base, keys, tokens, MASKED)
        raw = raw_scores(q, k, real, TAIL or MASKED, PRECISION)
        weights = tl.exp2(relative(raw, high[:, None], low[:, None], score_scale, PRECISE))
        if MASKED:
            weights += FLOOR
        weights *= load_vector(received_base, keys, tokens, 0.0, TAIL)[None, :]
        if ANCHORED:
            top, shrink = _anchor(weights, top)
            weights *= (1.0 / top)[:, None]
            total *= shrink
            out *= shrink[:, None]
        total += tl.sum(weights, 1)
        gathered = load_rows(gathered_base, begin, tokens, m_row, KEYS, DIM, BLOCK_DIM, TAIL)
        out = tl.dot(weights.to(gathered.dtype), gathered, out, input_precision=PRECISION)
    return out, total, top


@triton.jit
def elemmul_output(
    q_ptr, k_ptr, gathered_ptr, out_ptr, mask_ptr, cu_ptr, lse_ptr, centre_ptr, received_ptr, inverse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, m_batch, m_head, m_row, o_batch, o_head, o_row,
    heads, group, length, blocks, low_plane, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, ANCHORED: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of a block of rows and 1 / z; 0 for a row that sees no key."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        return
    rows = block * ROWS + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    gathered_base = states_base(gathered_ptr, batch, head, first, m_batch, m_head, m_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NOTHING if ANCHORED else 1.0, tl.float32)
    walk = tile_walk(tokens, KEYS)
    for TAIL in tl.static_range(2):
        out, total, top = _output_loop(
            out, total, top, q, high, low, k_base, k_row, gathered_base, m_row, mask_base, received_ptr + row_base,
            walk[TAIL], walk[TAIL + 1], tokens, score_scale, KEYS, DIM, BLOCK_DIM, TAIL, ANCHORED, PRECISE, MASKED, PRECISION,
        )  # fmt: skip
    visible = total > 0
    total = tl.where(visible, total, 1.0)
    out = out / total[:, None] + load_centre(centre_ptr, blocks, BLOCK_DIM)
    out = tl.where(visible[:, None], out, 0.0)
    out_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    store_rows(out_base, block * ROWS, tokens, o_row, out, ROWS, DIM, BLOCK_DIM)
    tl.store(inverse_ptr + row_base + rows, tl.where(visible, 1.0 / total / top, 0.0), mask=rows < tokens)

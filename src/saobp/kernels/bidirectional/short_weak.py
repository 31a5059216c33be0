# mypy: ignore-errors
"""Short bidirectional sequences with weak known strengths: a head's map in half precision in one program's registers.

Scores are computed once, a part of the rows at a time, and rounded immediately: to float16 for messages, which go to
shared memory and are summed over rows by the tensor cores, and to the inputs' type for refined weights, which stay
in registers until the keys' factors are known. Few registers are live, so several programs share a multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.forward import add_row_sums
from saobp.kernels.library.arithmetic import (
    INTERPRETED,
    _hardware_inverse,
    _hardware_log2,
    drop,
    finite,
    head_dropout,
    head_message,
    load_rows,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import locate, row_bases, states_base
from saobp.kernels.library.packed_bf16 import boosted, multiply, pair_logarithm, rounded
from saobp.kernels.library.prefetch import prefetch_for_later_program, prefetch_rows

COLUMNS = tl.constexpr(8)
"""Columns of products that only sum rows: narrow enough to take the second operand from registers."""


@triton.jit
def real_or(mask_base, places, tokens, yes, no, MASKED: tl.constexpr):
    """``yes`` where a token is real, ``no`` elsewhere, as float32 ``[places]``.

    The compiler picks a product's layout from the narrowest type among its sources, so the mask's bytes are hidden
    from it.
    """
    chosen = tl.where(real_tokens(mask_base, places, tokens, MASKED), yes, no)
    if MASKED and not INTERPRETED:
        chosen = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [chosen], tl.float32, False, 1)
    return chosen


@triton.jit
def inverse_or_zero(total, GAPS: tl.constexpr):
    """1 / total; 0 for a row that sees no key, possible only with GAPS."""
    if GAPS:
        return tl.where(total > 0, _hardware_inverse(total), 0.0)
    else:
        return _hardware_inverse(total)


@triton.jit
def row_sums_of(tile):
    """Sums of the rows of a tile in a half type, in each of COLUMNS columns."""
    ones = tl.full([tile.shape[1], COLUMNS], 1.0, tile.dtype)
    return add_row_sums(tl.zeros([tile.shape[0], COLUMNS], tl.float32), tile, ones, 0)


@triton.jit
def prior_rows(q, k, bound, score_scale, KIND: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr):
    """Exponentials ``[rows, keys]`` of scores minus each row's largest, in float16 and in KIND.

    Also that largest score and the row's sum. GAPS: ``bound`` ``[keys]`` is minus infinity for hidden keys, else infinity.
    """
    raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if GAPS:
        raw = tl.minimum(raw, bound[None, :])
    top = tl.max(raw, 1) * score_scale
    if GAPS:
        top = tl.where(top > float("-inf"), top, 0.0)
    e = tl.exp2(raw * score_scale - top[:, None])
    fine, coarse = rounded(e, tl.float16), rounded(e, KIND)
    # The second sum is unused. It forces the compiler to round now; otherwise float32 would stay live.
    total = tl.max(row_sums_of(fine) + 0.0 * row_sums_of(coarse), 1)
    return fine, coarse, top, total


@triton.jit
def store_lse(base, rows, tokens, top, total, GAPS: tl.constexpr):
    """Base-2 log-sum-exp of some rows; plus infinity for one that sees no key."""
    lse = top + _hardware_log2(total)
    if GAPS:
        lse = tl.where(total > 0, lse, float("inf"))
    tl.store(base + rows, lse, mask=rows < tokens)


@triton.jit
def polynomial(e, slope, bend, inverse):
    """(a + slope a^2 + bend a^3) / ``inverse`` for weights a = e inverse: rows need not be normalised first."""
    slope = (slope * inverse).to(e.dtype)[:, None]
    bend = (bend * inverse * inverse).to(e.dtype)[:, None]
    return boosted(e, (bend, slope, bend))


@triton.jit
def add_log_messages(sums, e, inverse, message):
    """Adds log messages of a tile's rows to ``sums`` ``[keys, COLUMNS]``, in units of l0, the slope of a message at 0.

    The product with the inverse of each row's sum normalises the rows and sums over them: column 0 takes the inverse in float16,
    column 1 what rounding it left.
    """
    unit, slope, bend = pair_logarithm(message)
    sent = polynomial(e, slope.to(tl.float32), bend.to(tl.float32), inverse)
    column = tl.arange(0, COLUMNS)[None, :]
    exact = tl.broadcast_to(inverse[:, None], [e.shape[0], COLUMNS])
    near = exact.to(tl.float16)
    left = (exact - near.to(tl.float32)).to(tl.float16)
    factors = tl.where(column == 0, near, tl.where(column == 1, left, 0.0))
    return tl.dot(tl.trans(sent), factors, sums)


@triton.jit
def boosted_rows(e, inverse, message):
    """``boosted`` weights of a tile: refined ones before the keys' factors, and up to a factor per row."""
    gamma, r0, r1, r2, l0, l1, l2 = message
    return polynomial(e, r1 / r0, r2 / r0, inverse)


@triton.jit
def add_messages_and_boost(
    sums, q, k, bound, sends, rows, lse_base, tokens, score_scale, message,
    KIND: tl.constexpr, RECEIVES: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr, SAVES: tl.constexpr,
):  # fmt: skip
    """``add_log_messages`` and ``boosted_rows`` of a part of the rows; ``sends`` is 0 for padding rows, which send no message."""
    fine, coarse, top, total = prior_rows(q, k, bound, score_scale, KIND, GAPS, PRECISION)
    if SAVES:
        store_lse(lse_base, rows, tokens, top, total, GAPS)
    inverse = inverse_or_zero(total, GAPS)
    if GAPS:
        inverse *= sends
    if RECEIVES:
        sums = add_log_messages(sums, fine, inverse, message)
    if RECEIVES != 2:
        coarse = boosted_rows(coarse, inverse, message)
    return sums, coarse


@triton.jit
def store_refined(
    refined, weight, v, out_base, begin, tokens, o_row, dropout, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, RECEIVES: tl.constexpr, DROPS: tl.constexpr, GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of some rows, from ``boosted_rows`` and the keys' factors."""
    ROWS: tl.constexpr = refined.shape[0]
    KEYS: tl.constexpr = refined.shape[1]
    if RECEIVES:
        refined = multiply(refined, weight[None, :])
    total = tl.max(row_sums_of(refined), 1)
    rows = begin + tl.arange(0, ROWS)
    refined = drop(refined, dropout, rows[:, None], tl.arange(0, KEYS)[None, :], DROPS)
    out = tl.dot(refined, v, input_precision=PRECISION)
    out *= (keep_scale * inverse_or_zero(total, GAPS))[:, None]
    store_rows(out_base, begin, tokens, o_row, out, ROWS, DIM, BLOCK_DIM)


@triton.jit
def short_weak_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, key_part_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    RECEIVES: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, SAVES: tl.constexpr,
):  # fmt: skip
    """Output of one head, and what the backward pass needs, as ``short.short_forward``; in parts of ROWS rows, all or half."""
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    SPLIT: tl.constexpr = ROWS < KEYS
    GAPS: tl.constexpr = TAIL or MASKED
    KIND: tl.constexpr = v_ptr.dtype.element_ty
    places = tl.arange(0, KEYS)
    rows = tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    out_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    score_scale += 0.0 * message[0]  # keeps it in a register; an argument would be loaded for every entry
    bound = real_or(mask_base, places, tokens, float("inf"), float("-inf"), MASKED)
    prefetch_rows(v_base, tokens, v_row, KEYS)
    if BLOCK_DIM > 64:
        prefetch_rows(v_base + 64, tokens, v_row, KEYS)
    prefetch_for_later_program(q_ptr, q_batch, q_head, q_row, heads, 1, length, KEYS, PACKED)
    prefetch_for_later_program(k_ptr, k_batch, k_head, k_row, heads, group, length, KEYS, PACKED)
    k = load_rows(k_base, 0, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
    q = load_rows(q_base, 0, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
    sends = real_or(mask_base, rows, tokens, 1.0, 0.0, MASKED)
    if SPLIT:
        rows_2 = rows + ROWS
        q_2 = load_rows(q_base, ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        sends_2 = real_or(mask_base, rows_2, tokens, 1.0, 0.0, MASKED)

    sums = tl.zeros([KEYS, COLUMNS], tl.float32)
    sums, refined = add_messages_and_boost(
        sums, q, k, bound, sends, rows, lse_ptr + row_base, tokens, score_scale, message,
        KIND, RECEIVES, GAPS, PRECISION, SAVES,
    )  # fmt: skip
    if SPLIT:
        sums, refined_2 = add_messages_and_boost(
            sums, q_2, k, bound, sends_2, rows_2, lse_ptr + row_base, tokens, score_scale, message,
            KIND, RECEIVES, GAPS, PRECISION, SAVES,
        )  # fmt: skip

    v = load_rows(v_base, 0, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
    weight = tl.zeros([KEYS], tl.float32)
    if RECEIVES:
        message_sums = tl.sum(sums, 1) * pair_logarithm(message)[0]
        if GAPS:
            message_sums = tl.minimum(message_sums, bound)
        message_sums -= finite(tl.max(message_sums, 0))
        weight = tl.exp2(message_sums)
        if SAVES:
            tl.store(key_part_ptr + row_base + places, message_sums, mask=places < tokens)
    weight = weight.to(KIND)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    store_refined(
        refined, weight, v, out_base, 0, tokens, o_row, dropout, keep_scale,
        DIM, BLOCK_DIM, RECEIVES, DROPS, GAPS, PRECISION,
    )  # fmt: skip
    if SPLIT:
        store_refined(
            refined_2, weight, v, out_base, ROWS, tokens, o_row, dropout, keep_scale,
            DIM, BLOCK_DIM, RECEIVES, DROPS, GAPS, PRECISION,
        )  # fmt: skip

# mypy: ignore-errors
"""Short strict causal sequences: a program holds the map of one head, in one launch.

Of 128 rows the first 64 see half of the keys only, so rows come in two parts of 64: each sees the keys of its own part, on the
diagonal, and all earlier ones. A row receives messages of earlier rows, if RECEIVES is 2 its own too: within a part by a
product with a triangle of ones, from the first part by a sum (``past``). Rows beyond the sequence send messages to such rows
only, so they need no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.forward import add_row_sums
from saobp.kernels.bidirectional.short import inverse_or_zero
from saobp.kernels.bidirectional.sums import as_reference
from saobp.kernels.causal.forward import causal_scores, lower_triangle
from saobp.kernels.library.arithmetic import (
    drop,
    finite,
    head_dropout,
    head_message,
    load_rows,
    log2_message,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.library.indexing import locate, row_bases, states_base
from saobp.kernels.library.packed_bf16 import half_log2, pair_logarithm, rounded
from saobp.kernels.library.prefetch import prefetch_for_later_program


@triton.jit
def message_unit(message, PRECISE: tl.constexpr):
    """Unit of ``sent_by``: for weak strengths l0, the slope of a log message at a = 0, so that float16 keeps their digits; else 1."""
    if PRECISE == 0:
        return pair_logarithm(message)[0]
    else:
        return 1.0


@triton.jit
def sent_by(a, rows_real, message, PRECISE: tl.constexpr, MASKED: tl.constexpr):
    """Log messages of a tile ``[rows, keys]`` over ``message_unit``, in the type of the product that sums them; 0 for padding rows."""
    if MASKED:
        a = tl.where(rows_real[:, None], a, 0.0)
    if PRECISE == 0:
        return half_log2(rounded(a, tl.float16), pair_logarithm(message))
    elif PRECISE == 1:
        return rounded(log2_message(a, message, PRECISE), tl.float16)
    else:
        return log2_message(a, message, PRECISE)


@triton.jit
def beliefs_of(scores, sent, message, RECEIVES: tl.constexpr, PRECISE: tl.constexpr):
    """Log beliefs of a tile ``[rows, keys]``: scores plus log messages received; if RECEIVES is 0, minus the row's own."""
    unit = message_unit(message, PRECISE)
    if RECEIVES:
        senders = (lower_triangle(sent.shape[0], tl.float32, RECEIVES == 2) * unit).to(sent.dtype)
        if PRECISE == 2:
            return scores + tl.dot(senders, sent, input_precision="ieee")
        else:
            return tl.dot(senders, sent, scores)
    else:
        return scores - unit * sent.to(tl.float32)


@triton.jit
def refined_rows(
    q, k, k_before, rows_real, before_real, past, message, score_scale,
    BEFORE: tl.constexpr, RECEIVES: tl.constexpr, CAREFUL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Prior and refined weights ``[ROWS, ROWS]`` of a part's rows, the latter not normalised, on its own keys and on those BEFORE.

    Also ``past``: the first part's sum of log messages, given for the second. CAREFUL: refined weights are relative to a row's
    largest, against underflow. Without BEFORE the weights on its own keys are returned in place of the others.
    """
    local = tl.arange(0, q.shape[0])
    raw = causal_scores(q, k, local, local, rows_real, True, MASKED, PRECISION)
    top = tl.max(raw, 1)
    raw_before = raw
    if BEFORE:
        raw_before = causal_scores(q, k_before, local, local, before_real, False, MASKED, PRECISION)
        top = tl.maximum(top, tl.max(raw_before, 1))
    reference = as_reference(top, score_scale, PRECISE)[:, None]
    scores = relative(raw, reference, 0.0, score_scale, PRECISE)
    scores_before = relative(raw_before, reference, 0.0, score_scale, PRECISE)
    a, a_before = tl.exp2(scores), tl.exp2(scores_before)
    total = tl.sum(a, 1)
    if BEFORE:
        total += tl.sum(a_before, 1)
    inverse = inverse_or_zero(total, MASKED)[:, None]
    a *= inverse
    a_before *= inverse
    sent = sent_by(a, rows_real, message, PRECISE, MASKED)
    beliefs = beliefs_of(scores, sent, message, RECEIVES, PRECISE)
    beliefs_before = beliefs
    if BEFORE:
        sent_before = sent_by(a_before, rows_real, message, PRECISE, MASKED)
        if RECEIVES:
            scores_before += past[None, :]
        beliefs_before = beliefs_of(scores_before, sent_before, message, RECEIVES, PRECISE)
    elif RECEIVES:
        past = tl.sum(sent.to(tl.float32), 0) * message_unit(message, PRECISE)
    if CAREFUL:
        anchor = tl.max(beliefs, 1)
        if BEFORE:
            anchor = tl.maximum(anchor, tl.max(beliefs_before, 1))
        if MASKED:
            anchor = finite(anchor)
        beliefs -= anchor[:, None]
        beliefs_before -= anchor[:, None]
    return a, a_before, tl.exp2(beliefs), tl.exp2(beliefs_before), past


@triton.jit
def store_output(
    refined, refined_before, v, v_before, base, start, tokens, stride, dropout, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BEFORE: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Normalises the rows of a part, applies dropout, and stores their products with values."""
    ROWS: tl.constexpr = v.shape[0]
    local = tl.arange(0, ROWS)
    rows = (start + local)[:, None]
    ones = tl.full([ROWS, 16], 1.0, v.dtype)
    refined, refined_before = rounded(refined, v.dtype), rounded(refined_before, v.dtype)
    totals = add_row_sums(tl.zeros([ROWS, 16], tl.float32), refined, ones, PRECISE)
    if BEFORE:
        totals = add_row_sums(totals, refined_before, ones, PRECISE)
    refined = drop(refined, dropout, rows, (start + local)[None, :], DROPS)
    refined_before = drop(refined_before, dropout, rows, local[None, :], DROPS)
    out = tl.dot(refined, v, input_precision=PRECISION)
    if BEFORE:
        out = tl.dot(refined_before, v_before, out, input_precision=PRECISION)
    out *= (keep_scale * inverse_or_zero(tl.max(totals, 1), MASKED))[:, None]
    store_rows(base, start, tokens, stride, out, ROWS, DIM, BLOCK_DIM)


@triton.jit
def short_causal_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr, past_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, TAIL: tl.constexpr,
    RECEIVES: tl.constexpr, CAREFUL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of one head of one sequence of at most ROWS tokens, or if SPLIT twice as many; exactly as many if not TAIL.

    The first part's sum of log messages is stored in ``past``, since the backward pass starts with the second part.
    """
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    out_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    ALL: tl.constexpr = 2 * ROWS if SPLIT else ROWS
    prefetch_for_later_program(q_ptr, q_batch, q_head, q_row, heads, 1, length, ALL, PACKED)
    prefetch_for_later_program(k_ptr, k_batch, k_head, k_row, heads, group, length, ALL, PACKED)
    prefetch_for_later_program(v_ptr, v_batch, v_head, v_row, heads, group, length, ALL, PACKED)
    q = load_rows(q_base, 0, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
    k = load_rows(k_base, 0, tokens, k_row, ROWS, DIM, BLOCK_DIM, TAIL)
    v = load_rows(v_base, 0, tokens, v_row, ROWS, DIM, BLOCK_DIM, TAIL)
    if SPLIT:
        q_2 = load_rows(q_base, ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        k_2 = load_rows(k_base, ROWS, tokens, k_row, ROWS, DIM, BLOCK_DIM, TAIL)
        v_2 = load_rows(v_base, ROWS, tokens, v_row, ROWS, DIM, BLOCK_DIM, TAIL)
    real = real_tokens(mask_base, tl.arange(0, ROWS), tokens, MASKED)
    past = tl.zeros([ROWS], tl.float32)
    _, _, refined, _, past = refined_rows(
        q, k, k, real, real, past, message, score_scale, False, RECEIVES, CAREFUL, PRECISE, MASKED, PRECISION
    )
    store_output(
        refined, refined, v, v, out_base, 0, tokens, o_row, dropout, keep_scale,
        DIM, BLOCK_DIM, False, PRECISE, MASKED, DROPS, PRECISION,
    )  # fmt: skip
    if SPLIT:
        if RECEIVES:
            tl.store(past_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS), past)
        real_2 = real_tokens(mask_base, ROWS + tl.arange(0, ROWS), tokens, MASKED)
        _, _, refined_2, refined_21, _ = refined_rows(
            q_2, k_2, k, real_2, real, past, message, score_scale, True, RECEIVES, CAREFUL, PRECISE, MASKED, PRECISION
        )  # fmt: skip
        store_output(
            refined_2, refined_21, v_2, v, out_base, ROWS, tokens, o_row, dropout, keep_scale,
            DIM, BLOCK_DIM, True, PRECISE, MASKED, DROPS, PRECISION,
        )  # fmt: skip

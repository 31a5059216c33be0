# mypy: ignore-errors
"""Short bidirectional sequences: a program holds the whole map of one head; one launch forward, one backward.

Scores are computed once and stay in registers, so the cost is close to that of reading and writing the states.
``key_part`` is c_k minus its largest: base-2 logarithms of the keys' factors.

CAREFUL: products of a weight and a key's factor may underflow. The forward pass then works in the log domain. The backward
pass recomputes a head in it if a row's normaliser turns out below LOWEST; after Hopper's kernel ``short_careful_backward`` does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.forward import add_row_sums
from saobp.kernels.library.arithmetic import (
    _hardware_log2,
    drop,
    drop_scaled,
    finite,
    head_dropout,
    head_message,
    inverse_message,
    load_lse,
    load_rows,
    load_vector,
    log2_message,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import locate, row_bases, states_base
from saobp.kernels.library.packed_bf16 import boosted, multiply, pair_message
from saobp.kernels.library.senders import senders_of_map

LOWEST = tl.constexpr(2.0**-80)
"""Smallest normaliser of a row for which products of weights in float32 or bfloat16 are exact enough."""


@triton.jit
def inverse_or_zero(total, MAY_BE_EMPTY: tl.constexpr):
    """1 / total; 0 for a row that sees no key, if MAY_BE_EMPTY."""
    if MAY_BE_EMPTY:
        return tl.where(total > 0, 1.0 / total, 0.0)
    else:
        return 1.0 / total


@triton.jit
def log_weights(raw, real, score_scale, GAPS: tl.constexpr):
    """Base-2 scores of a tile ``[rows, keys]`` minus each row's largest, which is returned too; ``real``: minus infinity for hidden keys."""
    if GAPS:
        raw = tl.minimum(raw, real[None, :])
    top = tl.max(raw, 1) * score_scale
    if GAPS:
        top = tl.where(top > float("-inf"), top, 0.0)
    return raw * score_scale - top[:, None], top


@triton.jit
def careful_rows(
    raw, real, sends, message_sums, score_scale, gamma, GAPS: tl.constexpr, RECEIVES: tl.constexpr
):  # fmt: skip
    """Refined weights ``[rows, keys]`` in the log domain, in float32, not normalised; the largest of a row is 1.

    real: ``[keys]``, minus infinity for hidden keys, else infinity; sends: ``[rows]``, 1 for rows that send messages, else 0.
    """
    scores, _ = log_weights(raw, real, score_scale, GAPS)
    e = tl.exp2(scores)
    beliefs = scores + message_sums[None, :]
    if RECEIVES != 2:
        slope = gamma * sends * inverse_or_zero(tl.sum(e, 1), GAPS)
        beliefs -= _hardware_log2(1.0 - slope[:, None] * e)
    anchor = tl.max(beliefs, 1)
    if GAPS:
        anchor = tl.where(anchor > float("-inf"), anchor, 0.0)
    return tl.exp2(beliefs - anchor[:, None])


@triton.jit
def short_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, key_part_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, RECEIVES: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, SAVES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Output of one head of one sequence of at most KEYS tokens; not TAIL: exactly KEYS.

    SAVES: the rows' log-sum-exp and the logarithms of the keys' factors, for the backward pass.
    """
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    places = tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    out_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    real = real_tokens(mask_base, places, tokens, MASKED)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    q = load_rows(q_base, 0, tokens, q_row, KEYS, DIM, BLOCK_DIM, TAIL)
    k = load_rows(k_base, 0, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
    v = load_rows(v_base, 0, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if TAIL or MASKED:
        scores = tl.where(real[None, :], scores, float("-inf"))
    top = tl.max(scores, 1) * score_scale
    if TAIL or MASKED:
        visible = top > float("-inf")
        top = tl.where(visible, top, 0.0)
    scores = scores * score_scale - top[:, None]
    a = tl.exp2(scores)
    total = tl.sum(a, 1)
    a *= inverse_or_zero(total, TAIL or MASKED)[:, None]
    if SAVES:
        lse = top + tl.log2(total)
        if TAIL or MASKED:
            lse = tl.where(visible, lse, float("inf"))
        tl.store(lse_ptr + row_base + places, lse, mask=places < tokens)

    PAIRS: tl.constexpr = PRECISE == 0 and not CAREFUL
    KIND: tl.constexpr = v_ptr.dtype.element_ty
    message_sums = tl.zeros([KEYS], tl.float32)
    if RECEIVES:
        sent = log2_message(a, message, PRECISE)
        sends, rows_per_sender = senders_of_map(real, places, tokens, STRIDE, MASKED)
        if MASKED or STRIDE > 1:
            sent = tl.where(sends[:, None], sent, 0.0)
        message_sums = tl.sum(sent, 0)
        if STRIDE > 1:
            message_sums *= rows_per_sender
        if TAIL or MASKED:
            message_sums = tl.where(real, message_sums, float("-inf"))
        message_sums -= finite(tl.max(message_sums, 0))
        if SAVES:
            tl.store(key_part_ptr + row_base + places, message_sums, mask=places < tokens)
    if PAIRS:
        refined = a.to(KIND)
        if RECEIVES != 2:
            refined = boosted(refined, pair_message(message, KIND))
        if MASKED and RECEIVES != 2:
            refined = tl.where(real[:, None], refined, a.to(KIND))
        if RECEIVES:
            refined = multiply(refined, tl.exp2(message_sums).to(KIND)[None, :])
    else:
        if RECEIVES == 2:
            weights = tl.full(a.shape, 1.0, tl.float32)
        else:
            weights = inverse_message(a, message, PRECISE)
            if MASKED:
                weights = tl.where(real[:, None], weights, 1.0)
        if CAREFUL:
            beliefs = scores + message_sums[None, :]
            anchor = tl.max(beliefs, 1)
            if TAIL or MASKED:
                anchor = tl.where(visible, anchor, 0.0)
            weights *= tl.exp2(beliefs - anchor[:, None])
        elif RECEIVES:
            weights *= a * tl.exp2(message_sums)[None, :]
        else:
            weights *= a
        refined = weights.to(KIND)
    totals = add_row_sums(tl.zeros([KEYS, 16], tl.float32), refined, tl.full([KEYS, 16], 1.0, KIND), PRECISE)
    inverse = keep_scale * inverse_or_zero(tl.max(totals, 1), TAIL or MASKED)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    refined = drop(refined, dropout, places[:, None], places[None, :], DROPS)
    out = tl.dot(refined, v, input_precision=PRECISION) * inverse[:, None]
    store_rows(out_base, 0, tokens, o_row, out, KEYS, DIM, BLOCK_DIM)


@triton.jit
def store_head_gradients(
    line, q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, key_part_ptr,
    dq_ptr, dk_ptr, dv_ptr, strength_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, scale, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, RECEIVES: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one head, and the gradient of its gamma per row; formulas and notation of backward.py.

    The whole map is in registers, so rows are normalised again, and D and dc are sums of the very weights that meet them: in
    collapsed heads large terms cancel, which a rounded log-sum-exp would prevent.
    """
    _, batch, head, first, tokens = locate(line, 1, heads, length, cu_ptr, PACKED)
    places = tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    d_base = states_base(0, batch, head, first, d_batch, d_head, d_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    real = real_tokens(mask_base, places, tokens, MASKED)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    gamma = message[0]
    q = load_rows(q_base, 0, tokens, q_row, KEYS, DIM, BLOCK_DIM, TAIL)
    k = load_rows(k_base, 0, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
    v = load_rows(v_base, 0, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
    grad = load_rows(g_base, 0, tokens, g_row, KEYS, DIM, BLOCK_DIM, TAIL)
    lse, _ = load_lse(lse_ptr + row_base, 0, places, tokens, PRECISE, TAIL)
    if RECEIVES:
        message_sums = load_vector(key_part_ptr + row_base, places, tokens, float("-inf"), TAIL)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if TAIL or MASKED:
        scores = tl.where(real[None, :], scores, float("-inf"))
    scores = scores * score_scale - lse[:, None]
    a = tl.exp2(scores)
    a *= inverse_or_zero(tl.sum(a, 1), TAIL or MASKED)[:, None]
    inverse = inverse_message(a, message, PRECISE)
    if MASKED:
        inverse = tl.where(real[:, None], inverse, 1.0)
    u = a * inverse
    refined = a if RECEIVES == 2 else u
    if RECEIVES:
        refined *= tl.exp2(message_sums)[None, :]
    total = tl.sum(refined, 1)
    if CAREFUL:  # noqa: SIM102 - Triton would evaluate both sides of "and"
        if tl.min(tl.where(lse < float("inf"), total, 1.0), 0) < LOWEST:
            raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            bound = tl.where(real, float("inf"), float("-inf"))
            is_sender = tl.where(real & (lse < float("inf")), 1.0, 0.0)
            refined = careful_rows(
                raw, bound, is_sender, message_sums, score_scale, gamma, TAIL or MASKED, RECEIVES
            )
            total = tl.sum(refined, 1)
    refined *= inverse_or_zero(total, TAIL or MASKED)[:, None]

    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    dropped = drop_scaled(refined, dropout, places[:, None], places[None, :], DROPS)
    dv = tl.dot(tl.trans(dropped.to(grad.dtype)), grad, input_precision=PRECISION)
    store_rows(dv_ptr + d_base, 0, tokens, d_row, dv, KEYS, DIM, BLOCK_DIM)

    dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    dp = drop_scaled(dp, dropout, places[:, None], places[None, :], DROPS)
    d_logits = refined * (dp - tl.sum(refined * dp, 1)[:, None])
    if RECEIVES == 2:
        d_message = -u * tl.sum(d_logits, 0)[None, :]
    elif RECEIVES:
        d_message = u * (d_logits - tl.sum(d_logits, 0)[None, :])
    else:
        d_message = u * d_logits
    sends, rows_per_sender = senders_of_map(real, places, tokens, STRIDE, MASKED)
    if MASKED or STRIDE > 1:
        d_message = tl.where(sends[:, None], d_message, 0.0)
    if STRIDE > 1:
        d_message *= rows_per_sender
    strength_grad = tl.sum(d_message, 1)
    tl.store(strength_grad_ptr + row_base + places, strength_grad, mask=places < tokens)
    d_scores = d_logits + gamma * (d_message - a * strength_grad[:, None])
    rounded = d_scores.to(k.dtype)
    dq = tl.dot(rounded, k, input_precision=PRECISION) * scale
    store_rows(dq_ptr + d_base, 0, tokens, d_row, dq, KEYS, DIM, BLOCK_DIM)
    dk = tl.dot(tl.trans(rounded), q, input_precision=PRECISION) * scale
    store_rows(dk_ptr + d_base, 0, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)


@triton.jit
def short_backward(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, key_part_ptr,
    dq_ptr, dk_ptr, dv_ptr, strength_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, scale, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, RECEIVES: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of one head, as ``store_head_gradients``."""
    store_head_gradients(
        tl.program_id(0),
        q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, key_part_ptr, dq_ptr,
        dk_ptr, dv_ptr, strength_grad_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head,
        v_row, g_batch, g_head, g_row, d_batch, d_head, d_row, heads, group, length, scale, score_scale,
        drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2, DIM, BLOCK_DIM, KEYS, TAIL, RECEIVES,
        CAREFUL, PRECISE, MASKED, PACKED, DROPS, PRECISION, STRIDE,
    )  # fmt: skip


@triton.jit
def short_careful_backward(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, key_part_ptr,
    dq_ptr, dk_ptr, dv_ptr, strength_grad_ptr, totals_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, lines, scale, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, RECEIVES: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, STRIDE: tl.constexpr, HEADS_EACH: tl.constexpr,
):  # fmt: skip
    """The gradients of a head again if one of its rows' normalisers, which ``short_hopper_backward`` stored in ``totals``, is too small.

    A program looks at HEADS_EACH heads at once, since hardly any of them is.
    """
    line = tl.program_id(0) * HEADS_EACH
    last = tl.minimum(line + HEADS_EACH, lines)
    numbers = tl.arange(0, HEADS_EACH * KEYS)
    totals_base = totals_ptr + line.to(tl.int64) * length
    if tl.min(load_vector(totals_base, numbers, (last - line) * length, 1.0, True), 0) < LOWEST:
        places = tl.arange(0, KEYS)
        for one in tl.range(line, last):
            _, batch, head, first, tokens = locate(one, 1, heads, length, cu_ptr, False)
            row_base, _ = row_bases(mask_ptr, batch, head, first, heads, length)
            totals = load_vector(totals_ptr + row_base, places, tokens, 1.0, TAIL)
            if tl.min(totals, 0) < LOWEST:
                store_head_gradients(
                    one,
                    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr,
                    key_part_ptr, dq_ptr, dk_ptr, dv_ptr, strength_grad_ptr, q_batch, q_head, q_row, k_batch,
                    k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row, d_batch, d_head, d_row,
                    heads, group, length, scale, score_scale, drop_threshold, keep_scale, sign, r0, r1, r2, l0,
                    l1, l2, DIM, BLOCK_DIM, KEYS, TAIL, RECEIVES, CAREFUL, PRECISE, MASKED, PACKED, DROPS,
                    PRECISION, STRIDE,
                )  # fmt: skip

# mypy: ignore-errors
"""Gradients of strict causal attention: three sweeps, no atomics.

With P the refined rows, D = rowsum(dO * O), dT = P * (dP - D), dP = dO V^T, u = a / (1 - gamma a) (0 for padding rows)
and g_ik the sum of dT_jk over the rows that receive row i's message, j > i, with a key bias (RECEIVES 2) j >= i:

1. ``causal_value_gradient`` (over keys, from the last row up): dV = P^T dO, and for every block of rows the sum of
   messages before it (``past``) and the sum of dT after it (``later`` = V . dV - P^T D so far). The sum of
   messages starts from the forward pass's total, and each row's message is subtracted.
2. ``causal_query_gradient`` (over rows): H = -u g, E = rowsum(H), dQ = (dT + gamma H) K - t (a K), where t is the
   row sum of dT + gamma H as it was rounded for that product. In exact arithmetic t is gamma E, as rows
   of dT sum to 0; but D comes from rounded outputs, and both errors have to cancel in collapsed rows.
3. ``causal_key_gradient`` (over keys): dK = (dT + gamma (H - a E))^T Q.

The derivative with respect to gamma is the sum of E. Rows of listing factors receive only their own
message, inverted: g = -dT. CHECKED: computes only the heads that ``weak_backward`` skips.

Names in the code: ``delta`` is D, ``dp`` dP, ``d_beliefs`` dT, ``key_delta`` P^T D, ``d_message`` H, ``strength_grad`` E, ``row_term`` t.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.causal.block_indexing import key_walk, row_walk, slot_place
from saobp.kernels.causal.forward import (
    add_compensated,
    beliefs_by_key,
    causal_scores,
    load_message_sums,
    log_messages,
    lower_triangle,
    prior_and_beliefs,
    scores_by_key,
    store_message_sums,
    upper_triangle,
)
from saobp.kernels.causal.row_kernels import is_careful_head
from saobp.kernels.library.arithmetic import (
    divided_by_message,
    drop_scaled,
    head_dropout,
    head_message,
    load_lse,
    load_or_zero,
    load_rows,
    load_vector,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate_sorted, mask_base_of, states_base
from saobp.kernels.library.packed_bf16 import rounded, widened


@triton.jit
def message_gradient(a, g, rows_real, message, PRECISE: tl.constexpr, MASKED: tl.constexpr):
    """H = -u g; 0 for padding rows, which send no message."""
    gradient = -divided_by_message(a, message, PRECISE) * g
    if MASKED:
        gradient = tl.where(rows_real, gradient, 0.0)
    return gradient


@triton.jit
def _climb(
    dv, key_delta, message_sums, lost, k, v, keys, keys_real, message, q_base, q_row, g_base, g_row, mask_base,
    lse_base, low_plane, belief_base, delta_base, past_base, later_base, length, span_start, start, stop, tokens,
    score_scale, dropout,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGE: tl.constexpr, KIND: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles ``[keys, ROWS]`` from row ``stop`` up to row ``start``, a multiple of ROWS: dV, P^T D and message sums so far."""
    for step in tl.range(0, tl.cdiv(stop - start, ROWS)):
        begin = tl.multiple_of(start + (tl.cdiv(stop - start, ROWS) - 1 - step) * ROWS, ROWS)
        local = tl.arange(0, ROWS)
        rows = begin + local
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, EDGE)
        high, low = load_lse(lse_base + begin, low_plane, local, tokens - begin, PRECISE, EDGE)
        belief, belief_low = load_lse(belief_base + begin, low_plane, local, tokens - begin, PRECISE, EDGE)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)[None, :]
        raw = scores_by_key(k, q, keys, rows, keys, EDGE, False, PRECISION)
        scores = relative(raw, high[None, :], low[None, :], score_scale, PRECISE)
        messages = log_messages(tl.exp2(scores), rows_real, message, PRECISE, MASKED)
        if RECEIVES:
            place = slot_place((begin - span_start) // ROWS, span_start, length, ROWS, PACKED)
            later = tl.sum(v.to(tl.float32) * dv, 1) - key_delta
            seen = keys < min(tokens, begin + ROWS)
            tl.store(later_base + place + keys, tl.where(keys_real, later, 0.0), mask=seen)
            message_sums, lost = add_compensated(message_sums, lost, -tl.sum(messages, 1), PRECISE)
            tl.store(past_base + place + keys, tl.where(keys_real, message_sums + lost, 0.0), mask=seen)
        beliefs = beliefs_by_key(
            scores, messages, (message_sums + lost)[:, None], ROWS, KIND, RECEIVES, PRECISE
        )
        refined = tl.exp2(relative(beliefs, belief[None, :], belief_low[None, :], 1.0, PRECISE))
        if RECEIVES:
            # The rounded weights that multiply dO, so that rounding errors cancel in ``later``.
            delta = load_vector(delta_base + begin, local, tokens - begin, 0.0, EDGE)[None, :]
            key_delta += tl.sum(refined.to(v.dtype).to(tl.float32) * delta, 1)
        refined = drop_scaled(refined, dropout, rows[None, :], keys[:, None], DROPS)
        grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, EDGE)
        dv = tl.dot(refined.to(grad.dtype), grad, dv, input_precision=PRECISION)
    return dv, key_delta, message_sums, lost


@triton.jit(do_not_specialize=["section"])
def causal_value_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, belief_ptr, delta_ptr, message_sums_ptr, key_delta_ptr, past_ptr, later_ptr, dv_ptr, head_lowest_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, section, sums_plane, span_start, span_stop, low_plane, lowest_sum,
    score_scale, drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LAST: tl.constexpr,
    CHECKED: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds a span's part to dV; LAST: the sequence's last span, which is processed first and starts the sum."""
    block, batch, head, first, tokens, line = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    if CHECKED:
        careful = is_careful_head(head_lowest_ptr, line, lowest_sum)
        if careful == 0:
            return
    KIND: tl.constexpr = tl.float32 if PRECISE == 2 else tl.float16
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    dv_base = states_base(dv_ptr, batch, head, first, d_batch, d_head, d_row)
    row_base = head_base(0, batch, head, first, heads, length)
    sums_base = head_base(0, batch, head, first, heads, sums_plane)
    mask_base = mask_base_of(mask_ptr, batch, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    message_sums, lost = load_message_sums(
        message_sums_ptr + row_base, low_plane, keys, tokens if RECEIVES else 0, PRECISE
    )
    key_delta = tl.zeros([KEYS], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    if not LAST:
        key_delta = load_vector(key_delta_ptr + row_base, keys, tokens, 0.0, True)
        dv = load_rows(dv_base, block * KEYS, tokens, d_row, KEYS, DIM, BLOCK_DIM, True).to(tl.float32)
    walk = row_walk(block * KEYS, span_start, span_stop, tokens, ROWS, KEYS)
    for leg in tl.static_range(2, -1, -1):
        dv, key_delta, message_sums, lost = _climb(
            dv, key_delta, message_sums, lost, k, v, keys, keys_real, message, q_base, q_row, g_base, g_row, mask_base,
            lse_ptr + row_base, low_plane, belief_ptr + row_base, delta_ptr + row_base, past_ptr + sums_base,
            later_ptr + sums_base, length, span_start,
            walk[leg], walk[leg + 1], tokens, score_scale, dropout,
            ROWS, DIM, BLOCK_DIM, leg != 1, KIND, RECEIVES, PRECISE, MASKED, PACKED, DROPS, PRECISION,
        )  # fmt: skip
    dv = tl.where(keys_real[:, None], dv, 0.0)
    store_rows(dv_base, block * KEYS, tokens, d_row, dv, KEYS, DIM, BLOCK_DIM)
    if RECEIVES:
        store_message_sums(
            message_sums_ptr + row_base, low_plane, keys, tokens, keys_real, message_sums, lost, PRECISE
        )
        tl.store(key_delta_ptr + row_base + keys, tl.where(keys_real, key_delta, 0.0), mask=keys < tokens)


@triton.jit
def _query_loop(
    dq, prior_k, strength_grad, row_term, q, grad, high, low, belief, belief_low, delta, rows, rows_real, message,
    k_base, k_row, v_base, v_row, mask_base, past_base, later_base,
    start, stop, tokens, score_scale, dropout,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGE: tl.constexpr,
    KIND: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys from ``start`` to ``stop``: adds to (dT + gamma H) K, a K, E and t."""
    for begin in tl.range(start, stop, KEYS):
        begin = tl.multiple_of(begin, KEYS)
        local = tl.arange(0, KEYS)
        keys = begin + local
        k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, EDGE)
        v = load_rows(v_base, begin, tokens, v_row, KEYS, DIM, BLOCK_DIM, EDGE)
        keys_real = real_tokens(mask_base, keys, tokens, MASKED)
        raw = causal_scores(q, k, rows, keys, keys_real, EDGE, MASKED, PRECISION)
        scores = relative(raw, high[:, None], low[:, None], score_scale, PRECISE)
        past = load_or_zero(past_base + begin, local, stop - begin, EDGE, RECEIVES)
        a, beliefs = prior_and_beliefs(
            scores, rows_real, past[None, :], message, ROWS, KIND, RECEIVES, PRECISE, MASKED
        )
        prior_k = tl.dot(a.to(k.dtype), k, prior_k, input_precision=PRECISION)
        refined = tl.exp2(relative(beliefs, belief[:, None], belief_low[:, None], 1.0, PRECISE))
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[:, None], keys[None, :], DROPS)
        d_beliefs = refined * (dp - delta[:, None])
        if RECEIVES:
            later = load_vector(later_base + begin, local, stop - begin, 0.0, EDGE)
            g = tl.dot(
                upper_triangle(ROWS, k.dtype, RECEIVES == 2), d_beliefs.to(k.dtype), input_precision="ieee"
            )
            g += later[None, :]
        else:
            g = -d_beliefs
        d_message = message_gradient(a, g, rows_real, message, PRECISE, MASKED)
        strength_grad += tl.sum(d_message, 1)
        d_scores = rounded(d_beliefs + message[0] * d_message, k.dtype)
        row_term += tl.sum(widened(d_scores), 1)
        dq = tl.dot(d_scores, k, dq, input_precision=PRECISION)
    return dq, prior_k, strength_grad, row_term


@triton.jit(do_not_specialize=["section"])
def causal_query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, belief_ptr, delta_ptr, past_ptr, later_ptr, dq_ptr, strength_grad_ptr, head_lowest_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, section, sums_plane, span_start, low_plane, lowest_sum,
    scale, score_scale, drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHECKED: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a block of the span's rows, and E, their parts of gamma's gradient."""
    slot, batch, head, first, tokens, line = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    slot = blocks - 1 - slot
    row_start = span_start + slot * ROWS
    if row_start >= tokens:
        return
    if CHECKED:
        careful = is_careful_head(head_lowest_ptr, line, lowest_sum)
        if careful == 0:
            return
    KIND: tl.constexpr = tl.float32 if PRECISE == 2 else tl.float16
    rows = row_start + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    row_base = head_base(0, batch, head, first, heads, length)
    sums_base = head_base(0, batch, head, first, heads, sums_plane)
    sums_base += slot_place(slot, span_start, length, ROWS, PACKED)
    mask_base = mask_base_of(mask_ptr, batch, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    q = load_rows(q_base, row_start, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    grad = load_rows(g_base, row_start, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    belief, belief_low = load_lse(belief_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)[:, None]
    dq = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    prior_k = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    strength_grad = tl.zeros([ROWS], tl.float32)
    row_term = tl.zeros([ROWS], tl.float32)
    for EDGE in tl.static_range(2):
        start, stop = key_walk(row_start, tokens, ROWS, KEYS, EDGE)
        dq, prior_k, strength_grad, row_term = _query_loop(
            dq, prior_k, strength_grad, row_term, q, grad, high, low, belief, belief_low, delta, rows, rows_real, message,
            k_base, k_row, v_base, v_row, mask_base, past_ptr + sums_base, later_ptr + sums_base,
            start, stop, tokens, score_scale, dropout,
            ROWS, KEYS, DIM, BLOCK_DIM, EDGE, KIND, RECEIVES, PRECISE, MASKED, DROPS, PRECISION,
        )  # fmt: skip
    dq = (dq - row_term[:, None] * prior_k) * scale
    dq_base = states_base(dq_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dq_base, row_start, tokens, d_row, dq, ROWS, DIM, BLOCK_DIM)
    tl.store(strength_grad_ptr + row_base + rows, strength_grad, mask=rows < tokens)


@triton.jit
def _key_loop(
    dk, k, v, keys, message, q_base, q_row, g_base, g_row, mask_base, lse_base, low_plane,
    belief_base, delta_base, strength_grad_base, past_base, later_base, length, span_start,
    start, stop, tokens, score_scale, dropout,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGE: tl.constexpr, KIND: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows from ``start`` to ``stop``: adds to dK."""
    for step in tl.range(0, tl.cdiv(stop - start, ROWS)):
        begin = tl.multiple_of(start + step * ROWS, ROWS)
        local = tl.arange(0, ROWS)
        rows = begin + local
        seen = min(tokens, begin + ROWS)
        place = slot_place((begin - span_start) // ROWS, span_start, length, ROWS, PACKED)
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, EDGE)
        grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, EDGE)
        high, low = load_lse(lse_base + begin, low_plane, local, tokens - begin, PRECISE, EDGE)
        belief, belief_low = load_lse(belief_base + begin, low_plane, local, tokens - begin, PRECISE, EDGE)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)[None, :]
        raw = scores_by_key(k, q, keys, rows, keys, EDGE, False, PRECISION)
        scores = relative(raw, high[None, :], low[None, :], score_scale, PRECISE)
        a = tl.exp2(scores)
        messages = log_messages(a, rows_real, message, PRECISE, MASKED)
        past = load_or_zero(past_base + place, keys, seen, True, RECEIVES)[:, None]
        beliefs = beliefs_by_key(scores, messages, past, ROWS, KIND, RECEIVES, PRECISE)
        refined = tl.exp2(relative(beliefs, belief[None, :], belief_low[None, :], 1.0, PRECISE))
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[None, :], keys[:, None], DROPS)
        d_beliefs = refined * (
            dp - load_vector(delta_base + begin, local, tokens - begin, 0.0, EDGE)[None, :]
        )
        if RECEIVES:
            later = load_vector(later_base + place, keys, seen, 0.0, True)[:, None]
            g = tl.dot(
                d_beliefs.to(q.dtype), lower_triangle(ROWS, q.dtype, RECEIVES == 2), input_precision="ieee"
            )
            g += later
        else:
            g = -d_beliefs
        d_message = message_gradient(a, g, rows_real, message, PRECISE, MASKED)
        strength_grad = load_vector(strength_grad_base + begin, local, tokens - begin, 0.0, EDGE)[None, :]
        d_scores = d_beliefs + message[0] * (d_message - a * strength_grad)
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk


@triton.jit(do_not_specialize=["section"])
def causal_key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, belief_ptr, delta_ptr, strength_grad_ptr, past_ptr, later_ptr, dk_ptr, head_lowest_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, section, sums_plane, span_start, span_stop, low_plane, lowest_sum,
    scale, score_scale, drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LAST: tl.constexpr,
    CHECKED: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds a span's part to dK; LAST: the sequence's last span, which is processed first and starts the sum."""
    block, batch, head, first, tokens, line = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    if CHECKED:
        careful = is_careful_head(head_lowest_ptr, line, lowest_sum)
        if careful == 0:
            return
    KIND: tl.constexpr = tl.float32 if PRECISE == 2 else tl.float16
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    dk_base = states_base(dk_ptr, batch, head, first, d_batch, d_head, d_row)
    row_base = head_base(0, batch, head, first, heads, length)
    sums_base = head_base(0, batch, head, first, heads, sums_plane)
    mask_base = mask_base_of(mask_ptr, batch, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    if not LAST:
        dk = load_rows(dk_base, block * KEYS, tokens, d_row, KEYS, DIM, BLOCK_DIM, True).to(tl.float32)
    walk = row_walk(block * KEYS, span_start, span_stop, tokens, ROWS, KEYS)
    for leg in tl.static_range(3):
        dk = _key_loop(
            dk, k, v, keys, message, q_base, q_row, g_base, g_row, mask_base, lse_ptr + row_base, low_plane,
            belief_ptr + row_base, delta_ptr + row_base, strength_grad_ptr + row_base, past_ptr + sums_base,
            later_ptr + sums_base, length, span_start,
            walk[leg], walk[leg + 1], tokens, score_scale, dropout,
            ROWS, DIM, BLOCK_DIM, leg != 1, KIND, RECEIVES, PRECISE, MASKED, PACKED, DROPS, PRECISION,
        )  # fmt: skip
    # Earlier spans do not see the keys of this one: their sum is complete.
    if block * KEYS >= span_start:
        dk *= scale
    dk = tl.where(keys_real[:, None], dk, 0.0)
    store_rows(dk_base, block * KEYS, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)

# mypy: ignore-errors
"""Gradients of strict causal attention of known, weak repulsion: ``backward.py`` in bfloat16.

In the same notation, with dO over the rows' normalisers (``scaled_gradients``) and d = dT + gamma H = dT - gamma u g:

1. ``weak_climb`` (over keys, from the last row up): dV, d^T Q, and for every block of rows two ``sums`` per key: the
   messages before the block, and -gamma times the sum of dT after it.
2. ``weak_query_gradient`` (over rows): t = rowsum(d), dQ = d K - t (a K).
3. ``weak_prior_gradient`` (over keys): dK = d^T Q - (a t)^T Q.

In a collapsed row gradients are what is left after large terms cancel. Weights are rounded as in the forward pass,
so D balances them. Sweeps 1 and 2 compute d by the same operations and round it before both products and sum;
otherwise rounding errors would not cancel.
Heads where a row's normaliser came near underflow are left to ``backward.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.causal.block_indexing import key_walk, row_walk, slot_place
from saobp.kernels.causal.forward import lower_triangle, scores_by_key
from saobp.kernels.causal.row_kernels import is_careful_head
from saobp.kernels.causal.weak_forward import (
    add_rows,
    any_column,
    halves,
    joined,
    load_pairs,
    store_key_pairs,
    store_pairs,
    store_sums,
    sums_over_rows,
    weak_log_messages,
    weak_prior,
    weak_triangle,
)
from saobp.kernels.library.arithmetic import (
    drop,
    drop_scaled,
    fetch_tile,
    head_dropout,
    head_message,
    load_rows,
    load_vector,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import (
    head_base,
    locate_sorted,
    mask_base_of,
    row_bases,
    states_base,
    states_of,
)
from saobp.kernels.library.packed_bf16 import (
    boosted,
    multiply,
    multiply_add,
    pair_logarithm,
    pair_message,
    rounded,
)


@triton.jit
def score_gradients(u, d_weights, refined, d_logits, triangle, later, pair):
    """d = dT - gamma u g of a tile ``[keys, rows]``; ``d_weights`` is dP - D, which times P (``refined``) is dT (``d_logits``).

    ``later`` ``[keys]`` is -gamma times the sum of dT over the rows after the tile; the triangle adds those within.
    dT is computed again inside the sum, unrounded: added to a rounded dT, a term below its last digit would always be lost,
    in thousands of keys with the same sign, and the gradient of a sink accumulates these errors.
    """
    KIND: tl.constexpr = d_logits.dtype
    g = rounded(tl.dot(d_logits, triangle, input_precision="ieee"), KIND)
    through_messages = multiply(u, multiply_add(g, -pair[0], later.to(KIND)[:, None]))
    return multiply_add(d_weights, refined, through_messages)


@triton.jit
def _climb(
    dv, dk, message_sums, after, k, v, keys, keys_real, gamma, logarithm, pair, queries, gradients, mask_base,
    pair_base, sums_base, length, span_start, start, stop, tokens, score_scale, dropout,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGE: tl.constexpr, RECEIVES: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Tiles ``[keys, ROWS]`` from row ``stop`` up to row ``start``, a multiple of ROWS: dV and d^T Q so far.

    ``message_sums`` starts as the log-message sums up to the tile's last row; the tile's are then subtracted. ``after``
    ``[keys, 16]`` has the sum of dT so far in every column.
    """
    KIND: tl.constexpr = k.dtype
    HALF: tl.constexpr = ROWS // 2
    # The tile's rows come in two halves: for each a triangle of half the side, and its message sums, which are needed anyway.
    back = -weak_triangle(logarithm, HALF, RECEIVES, False)
    ahead = lower_triangle(ROWS, KIND, RECEIVES == 2)
    ones = tl.full([HALF, 16], 1.0, tl.float16)
    ones_here = tl.full([ROWS, 16], 1.0, KIND)
    last = tl.cdiv(stop - start, ROWS) - 1
    place = slot_place((start - span_start) // ROWS + last, span_start, length, ROWS, PACKED)
    for step in tl.range(0, last + 1):
        begin = tl.multiple_of(start + (last - step) * ROWS, ROWS)
        rows = begin + tl.arange(0, ROWS)
        q = fetch_tile(queries, begin, tokens, ROWS, DIM, BLOCK_DIM, EDGE, MAPPED)
        grad = fetch_tile(gradients, begin, tokens, ROWS, DIM, BLOCK_DIM, EDGE, MAPPED)
        lse, delta = load_pairs(pair_base, begin, tokens, float("inf"), ROWS, EDGE)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)
        raw = scores_by_key(k, q, keys, rows, keys_real, EDGE, False, PRECISION)
        scores, _, sender_prior = weak_prior(raw, lse, rows_real, score_scale, MASKED)
        u = boosted(rounded(sender_prior, KIND), pair)
        scores0, scores1 = halves(scores)
        sender_prior0, sender_prior1 = halves(sender_prior)
        messages0, messages1 = (
            weak_log_messages(sender_prior0, logarithm),
            weak_log_messages(sender_prior1, logarithm),
        )
        beliefs1 = tl.dot(messages1, back, scores1 + message_sums[:, None])
        message_sums -= sums_over_rows(messages1, ones) * logarithm[0]
        beliefs0 = tl.dot(messages0, back, scores0 + message_sums[:, None])
        message_sums -= sums_over_rows(messages0, ones) * logarithm[0]
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        refined = joined(rounded(tl.exp2(beliefs0), KIND), rounded(tl.exp2(beliefs1), KIND))
        weights = drop(refined, dropout, rows[None, :], keys[:, None], DROPS)
        dv = tl.dot(weights, grad, dv, input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[None, :], keys[:, None], DROPS)
        d_weights = rounded(dp - delta[None, :], KIND)
        d_logits = multiply(d_weights, refined)
        later = any_column(after) * -gamma
        after = tl.dot(d_logits, ones_here, after, input_precision="ieee")
        d_scores = score_gradients(u, d_weights, refined, d_logits, ahead, later, pair)
        dk = tl.dot(d_scores, q, dk, input_precision=PRECISION)
        seen = min(tokens, begin + ROWS) if EDGE else tokens
        store_key_pairs(sums_base + 2 * place, keys, seen, keys_real, message_sums, later, MASKED)
        place -= length if PACKED else begin
    return dv, dk, message_sums, after


@triton.jit(do_not_specialize=["section"])
def weak_climb(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    pairs_ptr, head_lowest_ptr, message_sums_ptr, after_ptr, sums_ptr, dv_ptr, dk_ptr, q_map, grad_map,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, section, sums_plane, span_start, span_stop, lowest_sum,
    score_scale, drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LAST: tl.constexpr,
    CHECKED: tl.constexpr, RECEIVES: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Adds a span's part to dV and d^T Q; LAST: the sequence's last span, which is processed first and starts the sums."""
    block, batch, head, first, tokens, line = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    if CHECKED:
        careful = is_careful_head(head_lowest_ptr, line, lowest_sum)
        if careful != 0:
            return
    keys = block * KEYS + tl.arange(0, KEYS)
    queries = states_of(q_map, q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    gradients = states_of(grad_map, grad_ptr, batch, head, first, g_batch, g_head, g_row)
    dv_base = states_base(dv_ptr, batch, head, first, d_batch, d_head, d_row)
    dk_base = states_base(dk_ptr, batch, head, first, d_batch, d_head, d_row)
    row_base = head_base(0, batch, head, first, heads, length)
    sums_base = head_base(0, batch, head, first, heads, sums_plane)
    mask_base = mask_base_of(mask_ptr, batch, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    logarithm = pair_logarithm(message)
    pair = pair_message(message, k_ptr.dtype.element_ty)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    message_sums = load_vector(message_sums_ptr + row_base, keys, tokens, 0.0, True)
    after = tl.zeros([KEYS, 16], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    if not LAST:
        after += load_vector(after_ptr + row_base, keys, tokens, 0.0, True)[:, None]
        dv = load_rows(dv_base, block * KEYS, tokens, d_row, KEYS, DIM, BLOCK_DIM, True)
        dk = load_rows(dk_base, block * KEYS, tokens, d_row, KEYS, DIM, BLOCK_DIM, True)
    walk = row_walk(block * KEYS, span_start, span_stop, tokens, ROWS, KEYS)
    for leg in tl.static_range(2, -1, -1):
        dv, dk, message_sums, after = _climb(
            dv, dk, message_sums, after, k, v, keys, keys_real, message[0], logarithm, pair, queries, gradients,
            mask_base, pairs_ptr + row_base * 2, sums_ptr + sums_base * 2, length, span_start,
            walk[leg], walk[leg + 1], tokens, score_scale, dropout,
            ROWS, DIM, BLOCK_DIM, leg != 1, RECEIVES, MASKED, PACKED, DROPS, PRECISION, MAPPED,
        )  # fmt: skip
    if DROPS:
        # Earlier spans do not see the keys of this one: their sum is complete.
        dv *= tl.where(block * KEYS >= span_start, keep_scale, 1.0)
    dv = tl.where(keys_real[:, None], dv, 0.0)
    dk = tl.where(keys_real[:, None], dk, 0.0)
    store_rows(dv_base, block * KEYS, tokens, d_row, dv, KEYS, DIM, BLOCK_DIM)
    store_rows(dk_base, block * KEYS, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)
    store_sums(message_sums_ptr + row_base, keys, tokens, keys_real, message_sums, MASKED)
    store_sums(after_ptr + row_base, keys, tokens, keys_real, any_column(after), MASKED)


@triton.jit
def _query_loop(
    dq, prior_k, row_terms, q, grad, lse, delta, rows, rows_real, logarithm, pair, triangle,
    key_states, value_states, mask_base, sums_base,
    start, stop, tokens, score_scale, dropout,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGE: tl.constexpr,
    RECEIVES: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Keys from ``start`` to ``stop``: adds to (d K)^T and (a K)^T, and to t in parts, as ``add_rows``."""
    KIND: tl.constexpr = q.dtype
    for step in tl.range(0, tl.cdiv(stop - start, KEYS)):
        begin = tl.multiple_of(start + step * KEYS, KEYS)
        local = tl.arange(0, KEYS)
        keys = begin + local
        k = fetch_tile(key_states, begin, tokens, KEYS, DIM, BLOCK_DIM, EDGE, MAPPED)
        v = fetch_tile(value_states, begin, tokens, KEYS, DIM, BLOCK_DIM, EDGE, MAPPED)
        keys_real = real_tokens(mask_base, keys, tokens, MASKED)
        past, later = load_pairs(sums_base, begin, stop, 0.0, KEYS, EDGE)
        raw = scores_by_key(k, q, keys, rows, keys_real, EDGE, MASKED, PRECISION)
        scores, a, sender_prior = weak_prior(raw, lse, rows_real, score_scale, MASKED)
        prior = rounded(a, KIND)
        beliefs = tl.dot(weak_log_messages(sender_prior, logarithm), triangle, scores + past[:, None])
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        refined = rounded(tl.exp2(beliefs), KIND)
        prior_k = tl.dot(tl.trans(k), prior, prior_k, input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[None, :], keys[:, None], DROPS)
        d_weights = rounded(dp - delta[None, :], KIND)
        d_logits = multiply(d_weights, refined)
        u = boosted(rounded(sender_prior, KIND), pair)
        d_scores = score_gradients(
            u, d_weights, refined, d_logits, lower_triangle(ROWS, KIND, RECEIVES == 2), later, pair
        )
        row_terms = add_rows(row_terms, d_scores)
        dq = tl.dot(tl.trans(k), d_scores, dq, input_precision=PRECISION)
    return dq, prior_k, row_terms


@triton.jit(do_not_specialize=["section"])
def weak_query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, delta_ptr, head_lowest_ptr, sums_ptr, dq_ptr, term_pairs_ptr, k_map, v_map,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, section, sums_plane, span_start, lowest_sum,
    scale, score_scale, drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHECKED: tl.constexpr,
    RECEIVES: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
    MAPPED: tl.constexpr,
):  # fmt: skip
    """dQ of a block of the span's rows, and ``term_pairs`` ``[rows, 2]``: log-sum-exp and t."""
    slot, batch, head, first, tokens, line = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    slot = blocks - 1 - slot
    row_start = span_start + slot * ROWS
    if row_start >= tokens:
        return
    if CHECKED:
        careful = is_careful_head(head_lowest_ptr, line, lowest_sum)
        if careful != 0:
            return
    rows = row_start + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    key_states = states_of(k_map, k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    value_states = states_of(v_map, v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    row_base = head_base(0, batch, head, first, heads, length)
    sums_base = head_base(0, batch, head, first, heads, sums_plane)
    sums_base += slot_place(slot, span_start, length, ROWS, PACKED)
    mask_base = mask_base_of(mask_ptr, batch, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    logarithm = pair_logarithm(message)
    pair = pair_message(message, q_ptr.dtype.element_ty)
    triangle = weak_triangle(logarithm, ROWS, RECEIVES, True)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    q = load_rows(q_base, row_start, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    grad = load_rows(g_base, row_start, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
    lse = load_vector(lse_ptr + row_base, rows, tokens, float("inf"), True)
    delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)
    dq = tl.zeros([BLOCK_DIM, ROWS], tl.float32)
    prior_k = tl.zeros([BLOCK_DIM, ROWS], tl.float32)
    row_terms = tl.zeros([KEYS // 16, 8, ROWS], tl.float32)
    for EDGE in tl.static_range(2):
        start, stop = key_walk(row_start, tokens, ROWS, KEYS, EDGE)
        dq, prior_k, row_terms = _query_loop(
            dq, prior_k, row_terms, q, grad, lse, delta, rows, rows_real, logarithm, pair, triangle,
            key_states, value_states, mask_base, sums_ptr + sums_base * 2,
            start, stop, tokens, score_scale, dropout,
            ROWS, KEYS, DIM, BLOCK_DIM, EDGE, RECEIVES, MASKED, DROPS, PRECISION, MAPPED,
        )  # fmt: skip
    row_term = tl.sum(tl.sum(row_terms, 0), 0)
    dq = (dq - row_term[None, :] * prior_k) * scale
    dq_base = states_base(dq_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dq_base, row_start, tokens, d_row, tl.trans(dq), ROWS, DIM, BLOCK_DIM)
    store_pairs(term_pairs_ptr + row_base * 2, rows, tokens, lse, row_term)


@triton.jit
def _prior_loop(
    dk, k, keys, queries, pair_base, start, stop, tokens, score_scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    MAPPED: tl.constexpr,
):  # fmt: skip
    """Rows from ``start`` to ``stop``: adds to (a t)^T Q."""
    for step in tl.range(0, tl.cdiv(stop - start, ROWS)):
        begin = tl.multiple_of(start + step * ROWS, ROWS)
        local = tl.arange(0, ROWS)
        q = fetch_tile(queries, begin, tokens, ROWS, DIM, BLOCK_DIM, EDGE, MAPPED)
        lse, row_term = load_pairs(pair_base, begin, tokens, float("inf"), ROWS, EDGE)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        rows = begin + local
        if EDGE:
            raw = tl.where(keys[:, None] <= rows[None, :], raw, float("-inf"))
        weights = tl.exp2(raw * score_scale - lse[None, :]) * row_term[None, :]
        dk = tl.dot(rounded(weights, q.dtype), q, dk, input_precision=PRECISION)
    return dk


@triton.jit(do_not_specialize=["section"])
def weak_prior_gradient(
    q_ptr, k_ptr, mask_ptr, cu_ptr, term_pairs_ptr, head_lowest_ptr, dk_sums_ptr, dk_ptr, q_map,
    q_batch, q_head, q_row, k_batch, k_head, k_row, s_batch, s_head, s_row, d_batch, d_head, d_row,
    heads, group, length, blocks, section, lowest_sum, scale, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHECKED: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys, from ``dk_sums`` = d^T Q and the rows' t."""
    block, batch, head, first, tokens, line = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    if CHECKED:
        careful = is_careful_head(head_lowest_ptr, line, lowest_sum)
        if careful != 0:
            return
    keys = block * KEYS + tl.arange(0, KEYS)
    queries = states_of(q_map, q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    s_base = states_base(dk_sums_ptr, batch, head, first, s_batch, s_head, s_row)
    dk_base = states_base(dk_ptr, batch, head, first, d_batch, d_head, d_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    walk = row_walk(block * KEYS, 0, tokens, tokens, ROWS, KEYS)
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    for leg in tl.static_range(3):
        dk = _prior_loop(
            dk, k, keys, queries, term_pairs_ptr + row_base * 2, walk[leg], walk[leg + 1], tokens, score_scale,
            ROWS, DIM, BLOCK_DIM, leg != 1, PRECISION, MAPPED,
        )  # fmt: skip
    dk = load_rows(s_base, block * KEYS, tokens, s_row, KEYS, DIM, BLOCK_DIM, True) - dk
    dk = tl.where(keys_real[:, None], dk * scale, 0.0)
    store_rows(dk_base, block * KEYS, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)

# mypy: ignore-errors
"""Masked attention, gradients: the formulas of ``bidirectional.backward`` in the log domain, without atomics.

1. ``row_products``: D = rowsum(dO * O), with the rounding error of O (``rest``) added back: in a collapsed row dO V^T - D cancels.
2. ``masked_value_gradient`` (over keys): dV = P^T dO and dc = sum_j dT. dc = V . dV - P^T D would save a product, but
   the error of the strengths' gradient would be several times that of eager attention.
3. ``masked_query_gradient`` (over rows): H = u (dT - dc), E = rowsum(H), dQ = (dT + gamma H) K - gamma E (a K).
4. ``masked_key_gradient`` (over keys): dK = dS^T Q with dS = dT + gamma H - gamma E a, which is also the gradient of a mask of
   numbers, added to the scores.

CAUSAL: in the place of dT - dc stands -S, where S is the sum of dT over later rows. Sweep 2 goes up the rows and stores it for each
block of rows and the keys that the block sees (``later``). In a collapsed row both products of dQ are then much larger than
their difference, so the rounding errors of their tiles are multiplied too (``add_product``).

Names in the code: ``delta`` is D, ``dp`` dO V^T, ``d_logits`` dT, ``sums_grad`` dc or S, ``d_message`` H, ``gamma_grad`` E.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import (
    drop,
    drop_scaled,
    head_dropout,
    load_lse,
    load_or_zero,
    load_rows,
    load_vector,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate, states_base
from saobp.kernels.masked.tiles import (
    load_message,
    seen_scores,
    strict_triangle,
    table_places,
    visible_range,
    weights,
)


@triton.jit
def row_products(
    grad_ptr, out_ptr, rest_ptr, delta_ptr, g_batch, g_head, g_row, o_batch, o_head, o_row, r_batch, r_head, r_row,
    heads, length, blocks, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """D of each row: its gradient times its output, to which the rounding error is added back."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, grad_ptr, False)
    begin = block * ROWS
    rows = begin + tl.arange(0, ROWS)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    o_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, True).to(tl.float32)
    out = load_rows(o_base, begin, tokens, o_row, ROWS, DIM, BLOCK_DIM, True).to(tl.float32)
    if out_ptr.dtype.element_ty != tl.float32:
        r_base = states_base(rest_ptr, batch, head, first, r_batch, r_head, r_row)
        out += load_rows(r_base, begin, tokens, r_row, ROWS, DIM, BLOCK_DIM, True).to(tl.float32)
    base = head_base(delta_ptr, batch, head, first, heads, length)
    tl.store(base + rows, tl.sum(grad * out, 1), mask=rows < tokens)


@triton.jit
def masked_value_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, strength_ptr, nodes_ptr, mask_ptr, seed_ptr, key_spans_ptr,
    lse_ptr, message_sums_ptr, past_ptr, belief_ptr, delta_ptr, dv_ptr, sums_grad_ptr, later_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row, n_batch, n_head, m_batch, m_head, m_row, m_key, s_batch, s_head,
    heads, group, length, blocks, window, back, slots, lowest_bias, low_plane, score_scale, sign, drop_threshold, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
    RECEIVES: tl.constexpr, MASK: tl.constexpr, NODES: tl.constexpr, WINDOWED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV of a block of keys and dc, the gradient of their summed messages."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, nodes_ptr, False)
    begin = block * KEYS
    keys = begin + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    nodes_base = nodes_ptr + batch * n_batch + head * n_head
    mask_base = states_base(mask_ptr, batch, head, first, m_batch, m_head, m_row)
    view = (mask_base, m_row, m_key, lowest_bias, window, length)
    row_base = head_base(0, batch, head, first, heads, length)
    message = load_message(strength_ptr, head, sign)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    KIND: tl.constexpr = q_ptr.dtype.element_ty
    k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(nodes_base, keys, tokens, NODES)
    message_sums = load_or_zero(message_sums_ptr + row_base, keys, tokens, True, RECEIVES and not CAUSAL)
    v = load_rows(v_base, begin, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    dv = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    sums_grad = tl.zeros([KEYS], tl.float32)
    span_base = key_spans_ptr + batch * s_batch + head * s_head
    start, stop = visible_range(begin, tokens, window, span_base, KEYS, ROWS, MASK, WINDOWED, False, CAUSAL)
    tiles = (stop - start + ROWS - 1) // ROWS
    for turn in tl.range(0, tiles):
        place = start + (tiles - 1 - turn if CAUSAL else turn) * ROWS
        rows = place + tl.arange(0, ROWS)
        q = load_rows(q_base, place, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, 2, True)
        belief_high, belief_low = load_lse(belief_ptr + row_base, low_plane, rows, tokens, 2, True)
        sends = real_tokens(nodes_base, rows, tokens, NODES)[None, :]
        places = table_places(batch * heads + head, place, keys, back, slots, length, ROWS)
        if CAUSAL and RECEIVES:
            message_sums = tl.load(past_ptr + places, mask=keys < place, other=0.0)
        scores = seen_scores(
            raw, rows[None, :], keys[:, None], keys_real[:, None], view, score_scale, MASK, WINDOWED, CAUSAL
        )
        _, refined = weights(
            scores, (high[None, :], low[None, :]), (belief_high[None, :], belief_low[None, :]), message_sums[:, None], sends, message,
            RECEIVES, EXACT, CAUSAL, False, PRECISION,
        )  # fmt: skip
        delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, True)
        grad = load_rows(g_base, place, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
        if RECEIVES:
            if CAUSAL:
                tl.store(later_ptr + places, sums_grad, mask=keys < tokens)
            dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            dp = drop_scaled(dp, dropout, rows[None, :], keys[:, None], DROPS)
            sums_grad += tl.sum(refined * (dp - delta[None, :]), 1)
        refined = drop(refined.to(KIND), dropout, rows[None, :], keys[:, None], DROPS)
        dv = tl.dot(refined, grad, dv, input_precision=PRECISION)
    dv *= keep_scale
    dv_base = states_base(dv_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dv_base, begin, tokens, d_row, dv, KEYS, DIM, BLOCK_DIM)
    if RECEIVES and not CAUSAL:
        tl.store(sums_grad_ptr + row_base + keys, sums_grad, mask=keys < tokens)


@triton.jit
def message_gradient(a, d_logits, sums_grad, sends, message, RECEIVES: tl.constexpr, CAUSAL: tl.constexpr):
    """H of a tile: u (dT - dc) with u = a / (1 - gamma a); RECEIVES 2: -u dc; CAUSAL: -u S; RECEIVES 0: u dT. 0 for padding rows."""
    d_own = -sums_grad
    if RECEIVES == 0:
        d_own = d_logits
    elif RECEIVES == 1 and not CAUSAL:
        d_own = d_logits - sums_grad
    return tl.where(sends, a / (1.0 - message[0] * a) * d_own, 0.0)


@triton.jit
def add_product(total, tile, states, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """total + tile @ states. SPLIT: in two products, of the tile rounded to the type of the states and of its rounding error."""
    KIND: tl.constexpr = states.dtype
    large = tile.to(KIND)
    total = tl.dot(large, states, total, input_precision=PRECISION)
    if SPLIT and states.dtype != tl.float32:
        total = tl.dot((tile - large.to(tl.float32)).to(KIND), states, total, input_precision=PRECISION)
    return total


@triton.jit
def masked_query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, strength_ptr, nodes_ptr, mask_ptr, seed_ptr, spans_ptr,
    lse_ptr, message_sums_ptr, past_ptr, belief_ptr, delta_ptr, sums_grad_ptr, later_ptr, dq_ptr, gamma_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row, n_batch, n_head, m_batch, m_head, m_row, m_key, s_batch, s_head,
    heads, group, length, blocks, window, back, slots, lowest_bias, low_plane, scale, score_scale, sign, drop_threshold, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
    RECEIVES: tl.constexpr, MASK: tl.constexpr, NODES: tl.constexpr, WINDOWED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a block of rows, and E, the gradient of gamma."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, nodes_ptr, False)
    begin = block * ROWS
    rows = begin + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    nodes_base = nodes_ptr + batch * n_batch + head * n_head
    mask_base = states_base(mask_ptr, batch, head, first, m_batch, m_head, m_row)
    view = (mask_base, m_row, m_key, lowest_bias, window, length)
    row_base = head_base(0, batch, head, first, heads, length)
    message = load_message(strength_ptr, head, sign)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, 2, True)
    belief_high, belief_low = load_lse(belief_ptr + row_base, low_plane, rows, tokens, 2, True)
    delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, True)
    sends = real_tokens(nodes_base, rows, tokens, NODES)[:, None]
    dq = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    prior_k = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    gamma_grad = tl.zeros([ROWS], tl.float32)
    span_base = spans_ptr + batch * s_batch + head * s_head
    start, stop = visible_range(begin, tokens, window, span_base, ROWS, KEYS, MASK, WINDOWED, CAUSAL, False)
    for place in tl.range(start, stop, KEYS):
        keys = place + tl.arange(0, KEYS)
        k = load_rows(k_base, place, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
        v = load_rows(v_base, place, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        real = real_tokens(nodes_base, keys, tokens, NODES)
        scores = seen_scores(
            raw, rows[:, None], keys[None, :], real[None, :], view, score_scale, MASK, WINDOWED, CAUSAL
        )
        message_sums = load_or_zero(message_sums_ptr + row_base, keys, tokens, True, RECEIVES and not CAUSAL)
        places = table_places(batch * heads + head, begin, keys, back, slots, length, ROWS)
        if CAUSAL and RECEIVES:
            message_sums = tl.load(past_ptr + places, mask=keys < begin, other=0.0)
        a, refined = weights(
            scores, (high[:, None], low[:, None]), (belief_high[:, None], belief_low[:, None]), message_sums[None, :], sends, message,
            RECEIVES, EXACT, CAUSAL, True, PRECISION,
        )  # fmt: skip
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[:, None], keys[None, :], DROPS)
        d_logits = refined * (dp - delta[:, None])
        if CAUSAL and RECEIVES:
            after = tl.load(later_ptr + places, mask=keys < tokens, other=0.0)[None, :]
            sums_grad = after + tl.dot(strict_triangle(ROWS, True), d_logits, input_precision=PRECISION)
        else:
            sums_grad = load_or_zero(sums_grad_ptr + row_base, keys, tokens, True, RECEIVES)[None, :]
        d_message = message_gradient(a, d_logits, sums_grad, sends, message, RECEIVES, CAUSAL)
        gamma_grad += tl.sum(d_message, 1)
        dq = add_product(dq, d_logits + message[0] * d_message, k, CAUSAL, PRECISION)
        prior_k = add_product(prior_k, a, k, CAUSAL, PRECISION)
    tl.store(gamma_grad_ptr + row_base + rows, gamma_grad, mask=rows < tokens)
    dq = (dq - (message[0] * gamma_grad)[:, None] * prior_k) * scale
    dq_base = states_base(dq_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dq_base, begin, tokens, d_row, dq, ROWS, DIM, BLOCK_DIM)


@triton.jit
def masked_key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, strength_ptr, nodes_ptr, mask_ptr, seed_ptr, key_spans_ptr,
    lse_ptr, message_sums_ptr, past_ptr, belief_ptr, delta_ptr, sums_grad_ptr, later_ptr, gamma_grad_ptr,
    dk_ptr, mask_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row, n_batch, n_head, m_batch, m_head, m_row, m_key, s_batch, s_head,
    heads, group, length, blocks, window, back, slots, lowest_bias, low_plane, scale, score_scale, sign, drop_threshold, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
    RECEIVES: tl.constexpr, MASK: tl.constexpr, NODES: tl.constexpr, WINDOWED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPS: tl.constexpr, LEARNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys and, if the mask LEARNS, the gradient of its entries ``[batch, heads, length, length]``."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, nodes_ptr, False)
    begin = block * KEYS
    keys = begin + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    nodes_base = nodes_ptr + batch * n_batch + head * n_head
    mask_base = states_base(mask_ptr, batch, head, first, m_batch, m_head, m_row)
    view = (mask_base, m_row, m_key, lowest_bias, window, length)
    row_base = head_base(0, batch, head, first, heads, length)
    message = load_message(strength_ptr, head, sign)
    gamma = message[0]
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    KIND: tl.constexpr = q_ptr.dtype.element_ty
    k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, begin, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(nodes_base, keys, tokens, NODES)
    message_sums = load_or_zero(message_sums_ptr + row_base, keys, tokens, True, RECEIVES and not CAUSAL)
    key_sums_grad = load_or_zero(sums_grad_ptr + row_base, keys, tokens, True, RECEIVES and not CAUSAL)
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    span_base = key_spans_ptr + batch * s_batch + head * s_head
    start, stop = visible_range(begin, tokens, window, span_base, KEYS, ROWS, MASK, WINDOWED, False, CAUSAL)
    for place in tl.range(start, stop, ROWS):
        rows = place + tl.arange(0, ROWS)
        q = load_rows(q_base, place, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
        grad = load_rows(g_base, place, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, 2, True)
        belief_high, belief_low = load_lse(belief_ptr + row_base, low_plane, rows, tokens, 2, True)
        delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, True)
        row_term = gamma * load_vector(gamma_grad_ptr + row_base, rows, tokens, 0.0, True)
        sends = real_tokens(nodes_base, rows, tokens, NODES)[None, :]
        scores = seen_scores(
            raw, rows[None, :], keys[:, None], keys_real[:, None], view, score_scale, MASK, WINDOWED, CAUSAL
        )
        places = table_places(batch * heads + head, place, keys, back, slots, length, ROWS)
        if CAUSAL and RECEIVES:
            message_sums = tl.load(past_ptr + places, mask=keys < place, other=0.0)
        a, refined = weights(
            scores, (high[None, :], low[None, :]), (belief_high[None, :], belief_low[None, :]), message_sums[:, None], sends, message,
            RECEIVES, EXACT, CAUSAL, False, PRECISION,
        )  # fmt: skip
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[None, :], keys[:, None], DROPS)
        d_logits = refined * (dp - delta[None, :])
        if CAUSAL and RECEIVES:
            after = tl.load(later_ptr + places, mask=keys < tokens, other=0.0)[:, None]
            sums_grad = after + tl.dot(d_logits, strict_triangle(ROWS, False), input_precision=PRECISION)
        else:
            sums_grad = key_sums_grad[:, None]
        d_message = message_gradient(a, d_logits, sums_grad, sends, message, RECEIVES, CAUSAL)
        d_scores = d_logits + gamma * d_message - a * row_term[None, :]
        dk = tl.dot(d_scores.to(KIND), q, dk, input_precision=PRECISION)
        if LEARNS:
            entries = (row_base + rows[None, :]) * length + keys[:, None]
            tl.store(
                mask_grad_ptr + entries, d_scores, mask=(rows[None, :] < tokens) & (keys[:, None] < tokens)
            )
    dk_base = states_base(dk_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dk_base, begin, tokens, d_row, dk * scale, KEYS, DIM, BLOCK_DIM)

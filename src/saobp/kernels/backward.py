"""Gradients for long sequences, not causal: three sweeps, no atomics.

With P the refined rows, D = rowsum(dO * O), dT = P * (dO V^T - D) and u = a / (1 - gamma a):

1. ``value_gradient`` (over keys): dV = P^T dO and dc = sum_j dT = V . dV - P^T D.
2. ``query_gradient`` (over rows): H = u (dT - dc), E = rowsum(H), dQ = (dT + gamma H) K - gamma E (a K).
   The last product makes a separate sweep for E unnecessary.
3. ``key_gradient`` (over keys): dK = (dT + gamma (H - a E))^T Q.

The derivative with respect to gamma is the sum of E. Heads in which some row's normaliser is so small
that a product of weights may underflow take the CAREFUL way, with logarithms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.arithmetic import (
    head_message,
    head_seed,
    inverse_message,
    kept,
    load_lse,
    load_rows,
    load_vector,
    locate,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.forward import head_lowest


@triton.jit
def row_products(
    grad_ptr, out_ptr, cu_ptr, belief_ptr, delta_ptr, inverse_ptr, scaled_ptr,
    g_batch, g_head, g_row, o_batch, o_head, o_row,
    heads, length, blocks,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """D = rowsum(dO * O), the inverse of each refined row's normaliser, and their product."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    rows = block * ROWS + tl.arange(0, ROWS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    g_base = grad_ptr + batch64 * g_batch + head * g_head + first64 * g_row
    o_base = out_ptr + batch64 * o_batch + head * o_head + first64 * o_row
    grad = load_rows(g_base, block * ROWS, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
    out = load_rows(o_base, block * ROWS, tokens, o_row, ROWS, DIM, BLOCK_DIM, True)
    row_base = (batch64 * heads + head) * length + first64
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + row_base + rows, delta, mask=rows < tokens)
    belief = tl.load(belief_ptr + row_base + rows, mask=rows < tokens, other=0.0)
    inverse = tl.exp2(-belief)
    tl.store(inverse_ptr + row_base + rows, inverse, mask=rows < tokens)
    tl.store(scaled_ptr + row_base + rows, delta * inverse, mask=rows < tokens)


@triton.jit
def prior_weights(
    raw, high, low, rows_real, keys_real, score_scale, message,
    TAIL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Relative scores, prior weight a and inverse message of a tile; vectors come ready to broadcast."""
    if TAIL:
        raw = tl.where(keys_real, raw, float("-inf"))
    scores = relative(raw, high, low, score_scale, PRECISE)
    a = tl.exp2(scores)
    inverse = inverse_message(a, message, PRECISE)
    if MASKED:
        inverse = tl.where(rows_real, inverse, 1.0)
    return scores, a, inverse


@triton.jit
def refined_weights(scores, u, inverse, normaliser, key_part, HEARS: tl.constexpr, CAREFUL: tl.constexpr):
    """Refined weights. CAREFUL: normaliser and key_part are logarithms and one exponential does; else factors."""
    if CAREFUL:
        if HEARS:
            scores += key_part
        return tl.exp2(scores - normaliser) * inverse
    elif HEARS:
        return u * normaliser * key_part
    else:
        return u * normaliser


@triton.jit
def logit_gradient(
    scores, u, inverse, d_rows, normaliser, delta, key_part, HEARS: tl.constexpr, CAREFUL: tl.constexpr
):
    """dT = P (dP - D). Not CAREFUL: ``delta`` is already divided by the row's normaliser."""
    if CAREFUL:
        return refined_weights(scores, u, inverse, normaliser, key_part, HEARS, CAREFUL) * (d_rows - delta)
    elif HEARS:
        return u * key_part * (d_rows * normaliser - delta)
    else:
        return u * (d_rows * normaliser - delta)


@triton.jit
def _value_loop(
    dv, heard_grad, k, keys, key_part, q_base, q_row, g_base, g_row, mask_base, lse_base, low_plane,
    normaliser_base, delta_base,
    start, stop, tokens, score_scale, message, seed, drop_threshold, keep_scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr, HEARS: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Nothing but a sum depends on delta, so the compiler does not fetch it ahead of time: done by hand.
    delta = load_vector(delta_base, start + tl.arange(0, ROWS), tokens, 0.0, True)
    for begin in tl.range(start, stop, ROWS):
        rows = begin + tl.arange(0, ROWS)
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(lse_base, low_plane, rows, tokens, PRECISE, TAIL)
        normaliser = load_vector(normaliser_base, rows, tokens, 0.0, TAIL)
        later_delta = load_vector(delta_base, rows + ROWS, tokens, 0.0, True)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)
        scores, a, inverse = prior_weights(
            tl.dot(k, tl.trans(q), input_precision=PRECISION), high[None, :], low[None, :], rows_real[None, :],
            rows_real[None, :], score_scale, message, False, PRECISE, MASKED,
        )  # fmt: skip
        refined = refined_weights(
            scores, a * inverse, inverse, normaliser[None, :], key_part[:, None], HEARS, CAREFUL
        )
        heard_grad -= tl.sum(refined * delta[None, :], 1)
        delta = later_delta
        if DROPS:
            keep = kept(seed, rows[None, :], keys[:, None], drop_threshold)
            refined = tl.where(keep, refined * keep_scale, 0.0)
        grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        dv = tl.dot(refined.to(grad.dtype), grad, dv, input_precision=PRECISION)
    return dv, heard_grad


@triton.jit
def value_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, gamma_ptr,
    lse_ptr, heard_ptr, weight_ptr, belief_ptr, inverse_ptr, lowest_ptr, delta_ptr, scaled_ptr, dv_ptr, heard_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, lowest_blocks, low_plane, scale, score_scale, log2_lowest, drop_threshold,
    keep_scale, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, HEARS: tl.constexpr, PRECISE: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV of a block of keys and the gradient of what these keys hear."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = q_ptr + batch64 * q_batch + head * q_head + first64 * q_row
    k_base = k_ptr + batch64 * k_batch + (head // group) * k_head + first64 * k_row
    v_base = v_ptr + batch64 * v_batch + (head // group) * v_head + first64 * v_row
    g_base = grad_ptr + batch64 * g_batch + head * g_head + first64 * g_row
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    message = head_message(gamma_ptr, head, r0, r1, r2, l0, l1, l2)
    seed = tl.zeros([], tl.uint32)
    if DROPS:
        seed = head_seed(seed_ptr, row_base)
    lowest = head_lowest(
        lowest_ptr + tl.program_id(0) // blocks * lowest_blocks, lowest_blocks, LOWEST_BLOCKS
    )
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    heard = load_vector(heard_ptr + row_base, keys, tokens if HEARS else 0, 0.0, True)
    weight = load_vector(weight_ptr + row_base, keys, tokens if HEARS else 0, 0.0, True)
    dv = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    heard_grad = tl.zeros([KEYS], tl.float32)
    full = tokens // ROWS * ROWS
    if lowest < log2_lowest:
        dv, heard_grad = _value_loop(
            dv, heard_grad, k, keys, heard, q_base, q_row, g_base, g_row, mask_base, lse_ptr + row_base, low_plane,
            belief_ptr + row_base, delta_ptr + row_base,
            0, tokens, tokens, score_scale, message, seed, drop_threshold, keep_scale,
            ROWS, DIM, BLOCK_DIM, True, HEARS, PRECISE, MASKED, DROPS, True, PRECISION,
        )  # fmt: skip
    else:
        dv, heard_grad = _value_loop(
            dv, heard_grad, k, keys, weight, q_base, q_row, g_base, g_row, mask_base, lse_ptr + row_base, low_plane,
            inverse_ptr + row_base, delta_ptr + row_base,
            0, full, tokens, score_scale, message, seed, drop_threshold, keep_scale,
            ROWS, DIM, BLOCK_DIM, False, HEARS, PRECISE, MASKED, DROPS, False, PRECISION,
        )  # fmt: skip
        dv, heard_grad = _value_loop(
            dv, heard_grad, k, keys, weight, q_base, q_row, g_base, g_row, mask_base, lse_ptr + row_base, low_plane,
            inverse_ptr + row_base, delta_ptr + row_base,
            full, tokens, tokens, score_scale, message, seed, drop_threshold, keep_scale,
            ROWS, DIM, BLOCK_DIM, True, HEARS, PRECISE, MASKED, DROPS, False, PRECISION,
        )  # fmt: skip
    dv = tl.where(keys_real[:, None], dv, 0.0)
    dv_base = dv_ptr + batch64 * d_batch + head * d_head + first64 * d_row
    store_rows(dv_base, block * KEYS, tokens, d_row, dv, KEYS, DIM, BLOCK_DIM)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    heard_grad += tl.sum(v.to(tl.float32) * dv, 1)
    tl.store(heard_grad_ptr + row_base + keys, tl.where(keys_real, heard_grad, 0.0), mask=keys < tokens)


@triton.jit
def _query_loop(
    dq, prior_k, strength_grad, q, grad, high, low, normaliser, delta, rows, rows_real, gamma,
    k_base, k_row, v_base, v_row, mask_base, key_part_base, heard_grad_base,
    start, stop, tokens, score_scale, message, seed, drop_threshold, keep_scale,
    KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr, HEARS: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for begin in tl.range(start, stop, KEYS):
        keys = begin + tl.arange(0, KEYS)
        k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        v = load_rows(v_base, begin, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
        keys_real = real_tokens(mask_base, keys, tokens, MASKED)
        key_part = load_vector(key_part_base, keys, tokens if HEARS else 0, 0.0, TAIL or not HEARS)
        scores, a, inverse = prior_weights(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), high[:, None], low[:, None], rows_real[:, None],
            keys_real[None, :], score_scale, message, TAIL or MASKED, PRECISE, MASKED,
        )  # fmt: skip
        u = a * inverse
        d_rows = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if DROPS:
            keep = kept(seed, rows[:, None], keys[None, :], drop_threshold)
            d_rows = tl.where(keep, d_rows * keep_scale, 0.0)
        d_logits = logit_gradient(
            scores, u, inverse, d_rows, normaliser[:, None], delta[:, None], key_part[None, :], HEARS, CAREFUL
        )
        if HEARS:
            d_message = u * (d_logits - load_vector(heard_grad_base, keys, tokens, 0.0, TAIL)[None, :])
        else:
            d_message = u * d_logits
        if MASKED:
            d_message = tl.where(rows_real[:, None], d_message, 0.0)
        strength_grad += tl.sum(d_message, 1)
        dq = tl.dot((d_logits + gamma * d_message).to(k.dtype), k, dq, input_precision=PRECISION)
        prior_k = tl.dot(a.to(k.dtype), k, prior_k, input_precision=PRECISION)
    return dq, prior_k, strength_grad


@triton.jit
def query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, gamma_ptr,
    lse_ptr, heard_ptr, weight_ptr, belief_ptr, inverse_ptr, lowest_ptr, delta_ptr, scaled_ptr, heard_grad_ptr, dq_ptr, strength_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, lowest_blocks, low_plane, scale, score_scale, log2_lowest, drop_threshold,
    keep_scale, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, HEARS: tl.constexpr, PRECISE: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a block of rows, and E: the gradient of gamma, row by row."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        return
    rows = block * ROWS + tl.arange(0, ROWS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = q_ptr + batch64 * q_batch + head * q_head + first64 * q_row
    k_base = k_ptr + batch64 * k_batch + (head // group) * k_head + first64 * k_row
    v_base = v_ptr + batch64 * v_batch + (head // group) * v_head + first64 * v_row
    g_base = grad_ptr + batch64 * g_batch + head * g_head + first64 * g_row
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    message = head_message(gamma_ptr, head, r0, r1, r2, l0, l1, l2)
    seed = tl.zeros([], tl.uint32)
    if DROPS:
        seed = head_seed(seed_ptr, row_base)
    lowest = head_lowest(
        lowest_ptr + tl.program_id(0) // blocks * lowest_blocks, lowest_blocks, LOWEST_BLOCKS
    )
    q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    grad = load_rows(g_base, block * ROWS, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    belief = load_vector(belief_ptr + row_base, rows, tokens, 0.0, True)
    inverse = load_vector(inverse_ptr + row_base, rows, tokens, 0.0, True)
    delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, True)
    scaled = load_vector(scaled_ptr + row_base, rows, tokens, 0.0, True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)
    gamma = tl.load(gamma_ptr + head)
    dq = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    prior_k = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    strength_grad = tl.zeros([ROWS], tl.float32)
    full = tokens // KEYS * KEYS
    if lowest < log2_lowest:
        dq, prior_k, strength_grad = _query_loop(
            dq, prior_k, strength_grad, q, grad, high, low, belief, delta, rows, rows_real, gamma,
            k_base, k_row, v_base, v_row, mask_base, heard_ptr + row_base, heard_grad_ptr + row_base,
            0, tokens, tokens, score_scale, message, seed, drop_threshold, keep_scale,
            KEYS, DIM, BLOCK_DIM, True, HEARS, PRECISE, MASKED, DROPS, True, PRECISION,
        )  # fmt: skip
    else:
        dq, prior_k, strength_grad = _query_loop(
            dq, prior_k, strength_grad, q, grad, high, low, inverse, scaled, rows, rows_real, gamma,
            k_base, k_row, v_base, v_row, mask_base, weight_ptr + row_base, heard_grad_ptr + row_base,
            0, full, tokens, score_scale, message, seed, drop_threshold, keep_scale,
            KEYS, DIM, BLOCK_DIM, False, HEARS, PRECISE, MASKED, DROPS, False, PRECISION,
        )  # fmt: skip
        dq, prior_k, strength_grad = _query_loop(
            dq, prior_k, strength_grad, q, grad, high, low, inverse, scaled, rows, rows_real, gamma,
            k_base, k_row, v_base, v_row, mask_base, weight_ptr + row_base, heard_grad_ptr + row_base,
            full, tokens, tokens, score_scale, message, seed, drop_threshold, keep_scale,
            KEYS, DIM, BLOCK_DIM, True, HEARS, PRECISE, MASKED, DROPS, False, PRECISION,
        )  # fmt: skip
    dq = (dq - (gamma * strength_grad)[:, None] * prior_k) * scale
    dq_base = dq_ptr + batch64 * d_batch + head * d_head + first64 * d_row
    store_rows(dq_base, block * ROWS, tokens, d_row, dq, ROWS, DIM, BLOCK_DIM)
    tl.store(strength_grad_ptr + row_base + rows, strength_grad, mask=rows < tokens)


@triton.jit
def _key_loop(
    dk, k, v, keys, key_part, heard_grad, gamma, q_base, q_row, g_base, g_row, mask_base, lse_base, low_plane,
    normaliser_base, delta_base, strength_grad_base,
    start, stop, tokens, score_scale, message, seed, drop_threshold, keep_scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr, HEARS: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for begin in tl.range(start, stop, ROWS):
        rows = begin + tl.arange(0, ROWS)
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(lse_base, low_plane, rows, tokens, PRECISE, TAIL)
        normaliser = load_vector(normaliser_base, rows, tokens, 0.0, TAIL)
        delta = load_vector(delta_base, rows, tokens, 0.0, TAIL)
        strength_grad = load_vector(strength_grad_base, rows, tokens, 0.0, TAIL)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)
        scores, a, inverse = prior_weights(
            tl.dot(k, tl.trans(q), input_precision=PRECISION), high[None, :], low[None, :], rows_real[None, :],
            rows_real[None, :], score_scale, message, False, PRECISE, MASKED,
        )  # fmt: skip
        u = a * inverse
        d_rows = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        if DROPS:
            keep = kept(seed, rows[None, :], keys[:, None], drop_threshold)
            d_rows = tl.where(keep, d_rows * keep_scale, 0.0)
        d_logits = logit_gradient(
            scores, u, inverse, d_rows, normaliser[None, :], delta[None, :], key_part[:, None], HEARS, CAREFUL
        )
        d_message = u * (d_logits - heard_grad[:, None])
        if MASKED:
            d_message = tl.where(rows_real[None, :], d_message, 0.0)
        d_scores = d_logits + gamma * (d_message - a * strength_grad[None, :])
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk


@triton.jit
def key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, gamma_ptr,
    lse_ptr, heard_ptr, weight_ptr, belief_ptr, inverse_ptr, lowest_ptr, delta_ptr, scaled_ptr, heard_grad_ptr, strength_grad_ptr, dk_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, lowest_blocks, low_plane, scale, score_scale, log2_lowest, drop_threshold,
    keep_scale, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, HEARS: tl.constexpr, PRECISE: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = q_ptr + batch64 * q_batch + head * q_head + first64 * q_row
    k_base = k_ptr + batch64 * k_batch + (head // group) * k_head + first64 * k_row
    v_base = v_ptr + batch64 * v_batch + (head // group) * v_head + first64 * v_row
    g_base = grad_ptr + batch64 * g_batch + head * g_head + first64 * g_row
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    message = head_message(gamma_ptr, head, r0, r1, r2, l0, l1, l2)
    seed = tl.zeros([], tl.uint32)
    if DROPS:
        seed = head_seed(seed_ptr, row_base)
    lowest = head_lowest(
        lowest_ptr + tl.program_id(0) // blocks * lowest_blocks, lowest_blocks, LOWEST_BLOCKS
    )
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    gamma = tl.load(gamma_ptr + head)
    heard = load_vector(heard_ptr + row_base, keys, tokens if HEARS else 0, 0.0, True)
    weight = load_vector(weight_ptr + row_base, keys, tokens if HEARS else 0, 0.0, True)
    heard_grad = load_vector(heard_grad_ptr + row_base, keys, tokens if HEARS else 0, 0.0, True)
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    full = tokens // ROWS * ROWS
    if lowest < log2_lowest:
        dk = _key_loop(
            dk, k, v, keys, heard, heard_grad, gamma, q_base, q_row, g_base, g_row, mask_base, lse_ptr + row_base, low_plane,
            belief_ptr + row_base, delta_ptr + row_base, strength_grad_ptr + row_base,
            0, tokens, tokens, score_scale, message, seed, drop_threshold, keep_scale,
            ROWS, DIM, BLOCK_DIM, True, HEARS, PRECISE, MASKED, DROPS, True, PRECISION,
        )  # fmt: skip
    else:
        dk = _key_loop(
            dk, k, v, keys, weight, heard_grad, gamma, q_base, q_row, g_base, g_row, mask_base, lse_ptr + row_base, low_plane,
            inverse_ptr + row_base, scaled_ptr + row_base, strength_grad_ptr + row_base,
            0, full, tokens, score_scale, message, seed, drop_threshold, keep_scale,
            ROWS, DIM, BLOCK_DIM, False, HEARS, PRECISE, MASKED, DROPS, False, PRECISION,
        )  # fmt: skip
        dk = _key_loop(
            dk, k, v, keys, weight, heard_grad, gamma, q_base, q_row, g_base, g_row, mask_base, lse_ptr + row_base, low_plane,
            inverse_ptr + row_base, scaled_ptr + row_base, strength_grad_ptr + row_base,
            full, tokens, tokens, score_scale, message, seed, drop_threshold, keep_scale,
            ROWS, DIM, BLOCK_DIM, True, HEARS, PRECISE, MASKED, DROPS, False, PRECISION,
        )  # fmt: skip
    dk = tl.where(keys_real[:, None], dk * scale, 0.0)
    dk_base = dk_ptr + batch64 * d_batch + head * d_head + first64 * d_row
    store_rows(dk_base, block * KEYS, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)

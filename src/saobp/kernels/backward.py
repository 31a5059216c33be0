"""Gradients for long sequences, not causal: three sweeps, no atomics.

With P the refined rows, D = rowsum(dO * O), dT = P * (dO V^T - D) and u = a / (1 - gamma a):

1. ``value_gradient`` (over keys): dV = P^T dO and dc = sum_j dT = V . dV - P^T D.
2. ``query_gradient`` (over rows): H = u (dT - dc), E = rowsum(H), dQ = (dT + gamma H) K - t (a K) with
   t = gamma E, where the last product spares a sweep for E alone.
3. ``key_gradient`` (over keys): dK = (dT + gamma H - a t)^T Q.

rowsum(dT) is 0 but for the rounding of O inside D, and in a collapsed row gradients are what is left after
large terms cancel: so that sum is taken out, along a within t. Weak, known strengths (PRECISE 0) take all at once:
then t is the sum of dT + gamma H. Others go further: they take E and the sum first, mend D by it, and then round
the finished dT + gamma H - a t.

The derivative with respect to gamma is the sum of E; strengths that learn count as unknown. Where some row's
normaliser may be so small that a product of weights underflows, every sweep is launched twice: the CAREFUL one,
with a logarithm instead of a factor for ``key_part``, does the heads where that happened, the other one the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.arithmetic import (
    head_message,
    head_seed,
    inverse_message,
    kept,
    load_anchor,
    load_lse,
    load_rows,
    load_vector,
    locate,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.forward import is_careful


@triton.jit
def row_products(
    grad_ptr, out_ptr, cu_ptr, inverse_ptr, delta_ptr, scaled_ptr,
    g_batch, g_head, g_row, o_batch, o_head, o_row,
    heads, length, blocks,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """D = rowsum(dO * O) and, if SCALED, the same divided by the normaliser of the refined row."""
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
    if SCALED:
        inverse = tl.load(inverse_ptr + row_base + rows, mask=rows < tokens, other=0.0)
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
def before_normalising(scores, u, inverse, anchor, key_part, HEARS: tl.constexpr, CAREFUL: tl.constexpr):
    """Refined weights times their row's normaliser. CAREFUL: key_part is a logarithm; else a factor."""
    if CAREFUL:
        if HEARS:
            scores += key_part
        return tl.exp2(scores - anchor) * inverse
    elif HEARS:
        return u * key_part
    else:
        return u


@triton.jit
def score_gradient(
    scores, a, u, inverse, centred, anchor, key_part, heard_grad, HEARS: tl.constexpr, CAREFUL: tl.constexpr
):  # fmt: skip
    """dT + gamma H in few operations; centred is dO V^T - D over the normaliser, heard_grad is gamma dc.

    Since 1 + gamma u is the inverse message r, it is r (dT - gamma a dc) = u (r w centred - gamma dc).
    """
    if CAREFUL or not HEARS:
        weights = before_normalising(scores, u, inverse, anchor, key_part, HEARS, CAREFUL)
        return inverse * (weights * centred - a * heard_grad)
    else:
        return u * (inverse * key_part * centred - heard_grad)


@triton.jit
def value_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, inverse_ptr, lowest_ptr, delta_ptr, dv_ptr, heard_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, lowest_blocks, low_plane, scale, score_scale, lowest_sum, drop_threshold,
    keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr, TAIL: tl.constexpr,
    HEARS: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV of a block of keys and the gradient of what these keys hear, times gamma if PRECISE is 0."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    if CHECKED:
        lowest_base = lowest_ptr + tl.program_id(0) // blocks * lowest_blocks
        if is_careful(lowest_base, lowest_blocks, lowest_sum, LOWEST_BLOCKS) != (1 if CAREFUL else 0):
            return
    keys = block * KEYS + tl.arange(0, KEYS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = q_ptr + batch64 * q_batch + head * q_head + first64 * q_row
    k_base = k_ptr + batch64 * k_batch + (head // group) * k_head + first64 * k_row
    v_base = v_ptr + batch64 * v_batch + (head // group) * v_head + first64 * v_row
    g_base = grad_ptr + batch64 * g_batch + head * g_head + first64 * g_row
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    seed = tl.zeros([], tl.uint32)
    if DROPS:
        seed = head_seed(seed_ptr, row_base)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    key_part = load_vector(key_part_ptr + row_base, keys, tokens if HEARS else 0, 0.0, True)
    # A key's factor is the same for all rows, so it can wait for their sum, if the type has room for that.
    LATE_PART: tl.constexpr = PRECISE == 0 and HEARS and not CAREFUL
    dv = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    heard_grad = tl.zeros([KEYS], tl.float32)
    # Nothing but a sum depends on delta, so the compiler does not fetch it ahead of time: done by hand.
    delta = load_vector(delta_ptr + row_base, tl.arange(0, ROWS), tokens, 0.0, True)
    for start in tl.range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, TAIL)
        norm = load_vector(inverse_ptr + row_base, rows, tokens, 0.0, TAIL)
        anchor = load_anchor(anchor_ptr + row_base, rows, tokens, TAIL, CAREFUL)
        later_delta = load_vector(delta_ptr + row_base, rows + ROWS, tokens, 0.0, True)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)
        scores, a, inverse = prior_weights(
            tl.dot(k, tl.trans(q), input_precision=PRECISION), high[None, :], low[None, :], rows_real[None, :],
            rows_real[None, :], score_scale, message, False, PRECISE, MASKED,
        )  # fmt: skip
        refined = norm[None, :] * before_normalising(
            scores, a * inverse, inverse, anchor[None, :], key_part[:, None], HEARS and not LATE_PART, CAREFUL
        )
        heard_grad -= tl.sum(refined * delta[None, :], 1)
        delta = later_delta
        if DROPS:
            keep = kept(seed, rows[None, :], keys[:, None], drop_threshold)
            refined = tl.where(keep, refined * keep_scale, 0.0)
        grad = load_rows(g_base, start, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        dv = tl.dot(refined.to(grad.dtype), grad, dv, input_precision=PRECISION)
    if LATE_PART:
        dv *= key_part[:, None]
        heard_grad *= key_part
    dv = tl.where(keys_real[:, None], dv, 0.0)
    dv_base = dv_ptr + batch64 * d_batch + head * d_head + first64 * d_row
    store_rows(dv_base, block * KEYS, tokens, d_row, dv, KEYS, DIM, BLOCK_DIM)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    heard_grad += tl.sum(v.to(tl.float32) * dv, 1)
    if PRECISE == 0:
        heard_grad *= message[0]
    tl.store(heard_grad_ptr + row_base + keys, tl.where(keys_real, heard_grad, 0.0), mask=keys < tokens)


@triton.jit
def query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, inverse_ptr, lowest_ptr, delta_ptr, heard_grad_ptr, dq_ptr, strength_grad_ptr, row_term_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, lowest_blocks, low_plane, scale, score_scale, lowest_sum, drop_threshold,
    keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, LOWEST_BLOCKS: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr, TAIL: tl.constexpr,
    HEARS: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a block of rows and t. PART 0: both at once; 1: only t and E, the gradient of gamma; 2: only dQ, from t."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        return
    if CHECKED:
        lowest_base = lowest_ptr + tl.program_id(0) // blocks * lowest_blocks
        if is_careful(lowest_base, lowest_blocks, lowest_sum, LOWEST_BLOCKS) != (1 if CAREFUL else 0):
            return
    rows = block * ROWS + tl.arange(0, ROWS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = q_ptr + batch64 * q_batch + head * q_head + first64 * q_row
    k_base = k_ptr + batch64 * k_batch + (head // group) * k_head + first64 * k_row
    v_base = v_ptr + batch64 * v_batch + (head // group) * v_head + first64 * v_row
    g_base = grad_ptr + batch64 * g_batch + head * g_head + first64 * g_row
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    seed = tl.zeros([], tl.uint32)
    if DROPS:
        seed = head_seed(seed_ptr, row_base)
    q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    grad = load_rows(g_base, block * ROWS, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    norm = load_vector(inverse_ptr + row_base, rows, tokens, 0.0, True)
    anchor = load_anchor(anchor_ptr + row_base, rows, tokens, True, CAREFUL)
    delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)
    gamma = message[0]
    dq = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    prior_k = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    strength_grad = tl.zeros([ROWS], tl.float32)
    excess = tl.zeros([ROWS], tl.float32)
    overlap = tl.zeros([ROWS], tl.float32)
    row_term = tl.zeros([ROWS], tl.float32)
    if PART == 2:
        row_term = load_vector(row_term_ptr + row_base, rows, tokens, 0.0, True)
    for start in tl.range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
        keys_real = real_tokens(mask_base, keys, tokens, MASKED)
        key_part = load_vector(key_part_ptr + row_base, keys, tokens if HEARS else 0, 0.0, TAIL or not HEARS)
        scores, a, inverse = prior_weights(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), high[:, None], low[:, None], rows_real[:, None],
            keys_real[None, :], score_scale, message, TAIL or MASKED, PRECISE, MASKED,
        )  # fmt: skip
        u = a * inverse
        d_rows = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if DROPS:
            keep = kept(seed, rows[:, None], keys[None, :], drop_threshold)
            d_rows = tl.where(keep, d_rows * keep_scale, 0.0)
        centred = d_rows * norm[:, None] - delta[:, None]
        if HEARS:
            heard_grad = load_vector(heard_grad_ptr + row_base, keys, tokens, 0.0, TAIL)[None, :]
        else:
            heard_grad = tl.zeros([1, KEYS], tl.float32)
        if PART == 0:
            if MASKED:
                heard_grad = tl.where(rows_real[:, None], heard_grad, 0.0)
            d_scores = score_gradient(
                scores, a, u, inverse, centred, anchor[:, None], key_part[None, :], heard_grad, HEARS, CAREFUL
            )
            row_term += tl.sum(d_scores, 1)
            prior_k = tl.dot(a.to(k.dtype), k, prior_k, input_precision=PRECISION)
        else:
            weights = before_normalising(
                scores, u, inverse, anchor[:, None], key_part[None, :], HEARS, CAREFUL
            )
            d_logits = weights * centred
            d_message = u * (d_logits - heard_grad)
            if MASKED:
                d_message = tl.where(rows_real[:, None], d_message, 0.0)
            if PART == 1:
                excess += tl.sum(d_logits, 1)
                overlap += tl.sum(u * weights, 1)
                strength_grad += tl.sum(d_message, 1)
            d_scores = d_logits + gamma * d_message - a * row_term[:, None]
        if PART != 1:
            dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision=PRECISION)
    if PART == 1:
        tl.store(delta_ptr + row_base + rows, delta + excess * norm, mask=rows < tokens)
        strength_grad -= tl.where(rows_real, excess * overlap * norm, 0.0)
        row_term = gamma * strength_grad
        tl.store(strength_grad_ptr + row_base + rows, strength_grad, mask=rows < tokens)
    if PART != 2:
        tl.store(row_term_ptr + row_base + rows, row_term, mask=rows < tokens)
    if PART == 0:
        dq -= row_term[:, None] * prior_k
    if PART != 1:
        dq_base = dq_ptr + batch64 * d_batch + head * d_head + first64 * d_row
        store_rows(dq_base, block * ROWS, tokens, d_row, dq * scale, ROWS, DIM, BLOCK_DIM)


@triton.jit
def key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, inverse_ptr, lowest_ptr, delta_ptr, heard_grad_ptr, row_term_ptr, dk_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, lowest_blocks, low_plane, scale, score_scale, lowest_sum, drop_threshold,
    keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr, TAIL: tl.constexpr,
    HEARS: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    if CHECKED:
        lowest_base = lowest_ptr + tl.program_id(0) // blocks * lowest_blocks
        if is_careful(lowest_base, lowest_blocks, lowest_sum, LOWEST_BLOCKS) != (1 if CAREFUL else 0):
            return
    keys = block * KEYS + tl.arange(0, KEYS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = q_ptr + batch64 * q_batch + head * q_head + first64 * q_row
    k_base = k_ptr + batch64 * k_batch + (head // group) * k_head + first64 * k_row
    v_base = v_ptr + batch64 * v_batch + (head // group) * v_head + first64 * v_row
    g_base = grad_ptr + batch64 * g_batch + head * g_head + first64 * g_row
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    seed = tl.zeros([], tl.uint32)
    if DROPS:
        seed = head_seed(seed_ptr, row_base)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    gamma = message[0]
    key_part = load_vector(key_part_ptr + row_base, keys, tokens if HEARS else 0, 0.0, True)
    heard_grad = load_vector(heard_grad_ptr + row_base, keys, tokens if HEARS else 0, 0.0, True)
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    for start in tl.range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        grad = load_rows(g_base, start, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, TAIL)
        norm = load_vector(inverse_ptr + row_base, rows, tokens, 0.0, TAIL)
        anchor = load_anchor(anchor_ptr + row_base, rows, tokens, TAIL, CAREFUL)
        delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, TAIL)
        row_term = load_vector(row_term_ptr + row_base, rows, tokens, 0.0, TAIL)
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
        centred = d_rows * norm[None, :] - delta[None, :]
        if PRECISE == 0:
            heard = heard_grad[:, None]
            if MASKED:
                heard = tl.where(rows_real[None, :], heard, 0.0)
            d_scores = score_gradient(
                scores, a, u, inverse, centred, anchor[None, :], key_part[:, None], heard, HEARS, CAREFUL
            )
        else:
            d_logits = centred * before_normalising(
                scores, u, inverse, anchor[None, :], key_part[:, None], HEARS, CAREFUL
            )
            d_message = u * (d_logits - heard_grad[:, None])
            if MASKED:
                d_message = tl.where(rows_real[None, :], d_message, 0.0)
            d_scores = d_logits + gamma * d_message
        d_scores -= a * row_term[None, :]
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    dk = tl.where(keys_real[:, None], dk * scale, 0.0)
    dk_base = dk_ptr + batch64 * d_batch + head * d_head + first64 * d_row
    store_rows(dk_base, block * KEYS, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)

# mypy: ignore-errors
"""Gradients for long bidirectional sequences: three sweeps, no atomics.

With P the refined rows, D = rowsum(dO * O), dT = P * (dP - D), dP = dO V^T, and u = a / (1 - gamma a):

1. ``value_gradient`` (over keys): dV = P^T dO and dc = sum_j dT = V . dV - P^T D.
2. ``query_gradient`` (over rows): H = u (dT - dc), E = rowsum(H), dQ = (dT + gamma H) K - t (a K) with
   t = gamma E, where the last product saves a separate sweep for E.
3. ``key_gradient`` (over keys): dK = (dT + gamma H - a t)^T Q.

The derivative with respect to gamma is the sum of E, which is not stored for known weak strengths (PRECISE 0).

Names in the code: ``delta`` is D, ``dp`` dP, ``d_logits`` dT, ``sums_grad`` dc, ``d_message`` H, ``strength_grad`` E, ``row_term`` t.

In a collapsed row gradients are what is left after large terms cancel. So every sweep takes dO divided by the
row's normaliser and rounded (``scaled_gradients``), and D from the same rounded values; and dV and P^T D come from
the same rounded weights. What rounding leaves of rowsum(dT), which should be 0, is taken out with t as far as P lies along a;
in a sink that other rows' messages suppress it does not.

If a row's normaliser may be so small that a product of weights underflows, every sweep is launched twice: CAREFUL,
with the keys' factors (``key_part``) as logarithms, for the heads where that happened, and once for the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.forward import add_row_sums, is_careful
from saobp.kernels.bidirectional.gradient_terms import (
    closeness,
    load_power,
    prior_weights,
    sender_inverse,
    sender_pair,
    unnormalised_weights,
)
from saobp.kernels.library.arithmetic import (
    drop,
    drop_scaled,
    head_dropout,
    head_message,
    load_anchor,
    load_lse,
    load_or_zero,
    load_rows,
    load_vector,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import locate, row_bases, states_base
from saobp.kernels.library.packed_bf16 import boosted, multiply, multiply_add, pair_message


@triton.jit
def store_value_gradient(
    block, batch, head, first, tokens, q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, seed_ptr, strength_ptr, lse_ptr,
    key_part_ptr, anchor_ptr, power_ptr, delta_ptr, parts_ptr, dv_ptr, sums_grad_ptr, minus_gamma_dc_ptr, q_batch,
    q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row, d_batch, d_head, d_row,
    part_row, heads, group, length, low_plane, score_scale, drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1,
    l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAREFUL: tl.constexpr,
    TAIL: tl.constexpr, POWER: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV of a block of keys and dc, the gradient of their message sums; if PRECISE is 0 also -gamma dc, rounded.

    D comes in half-type ``parts``, for a product of the tensor cores, but as ``delta`` if PRECISE is 2 or CAREFUL: with that product
    ptxas 12.8 computed an operand's address in ``careful_gradients`` from a register that nothing had set.
    """
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    KIND: tl.constexpr = q_ptr.dtype.element_ty
    pair = pair_message(message, KIND)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    key_part = load_or_zero(key_part_ptr + row_base, keys, tokens, True, RECEIVES).to(tl.float32)
    # A key's factor is the same for all rows, so it is applied to the sum over them, if the type has the range.
    LATE_PART: tl.constexpr = RECEIVES and not CAREFUL and not POWER
    RECEIVES_HERE: tl.constexpr = 0 if LATE_PART else RECEIVES
    dv = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    key_delta = tl.zeros([KEYS, 16], tl.float32)  # P^T D, to be summed over columns
    for start in tl.range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, TAIL)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)
        scores, a = prior_weights(
            tl.dot(k, tl.trans(q), input_precision=PRECISION), high[None, :], low[None, :], rows_real[None, :],
            score_scale, False, PRECISE,
        )  # fmt: skip
        if PRECISE == 0 and not CAREFUL and RECEIVES == 2:
            refined = a.to(KIND)
        elif PRECISE == 0 and not CAREFUL:
            refined = boosted(a.to(KIND), sender_pair(pair, rows_real[None, :].to(KIND), MASKED))
        else:
            anchor = load_anchor(anchor_ptr + row_base, rows, tokens, TAIL, CAREFUL)
            power = load_power(power_ptr + row_base, rows, tokens, TAIL, POWER)
            inverse = sender_inverse(a, rows_real[None, :], message, PRECISE, MASKED)
            refined = unnormalised_weights(
                scores, a if RECEIVES == 2 else a * inverse, inverse, anchor[None, :], power[None, :], key_part[:, None],
                RECEIVES_HERE, CAREFUL, POWER,
            ).to(KIND)  # fmt: skip
        if PRECISE == 2 or CAREFUL:
            delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, TAIL)
            key_delta += tl.sum(refined.to(tl.float32) * delta[None, :], 1)[:, None] * 0.0625
        else:
            parts = load_rows(parts_ptr + row_base * part_row, start, tokens, part_row, ROWS, 16, 16, TAIL)
            key_delta = tl.dot(refined, parts, key_delta)
        refined = drop(refined, dropout, rows[None, :], keys[:, None], DROPS)
        grad = load_rows(g_base, start, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        dv = tl.dot(refined, grad, dv, input_precision=PRECISION)
    sums_grad = -tl.sum(key_delta, 1)
    if DROPS:
        dv *= keep_scale
    if LATE_PART:
        dv *= key_part[:, None]
        sums_grad *= key_part
    dv = tl.where(keys_real[:, None], dv, 0.0)
    dv_base = states_base(dv_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dv_base, block * KEYS, tokens, d_row, dv, KEYS, DIM, BLOCK_DIM)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    sums_grad += tl.sum(v.to(tl.float32) * dv, 1)
    sums_grad = tl.where(keys_real, sums_grad, 0.0)
    tl.store(sums_grad_ptr + row_base + keys, sums_grad, mask=keys < tokens)
    if PRECISE == 0:
        tl.store(minus_gamma_dc_ptr + row_base + keys, -message[0] * sums_grad, mask=keys < tokens)


@triton.jit
def value_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, power_ptr, lowest_ptr, delta_ptr, parts_ptr, dv_ptr,
    sums_grad_ptr, minus_gamma_dc_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row, part_row,
    heads, group, length, blocks, lowest_blocks, low_plane, scale, score_scale, lowest_sum, drop_threshold,
    keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr, TAIL: tl.constexpr, POWER: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``store_value_gradient``, of the program's block, in heads that are careful if CAREFUL is."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    if CHECKED:
        careful = is_careful(lowest_ptr, tl.program_id(0) // blocks, lowest_blocks, lowest_sum, LOWEST_BLOCKS)
        if careful != (1 if CAREFUL else 0):
            return
    store_value_gradient(
        block, batch, head, first, tokens, q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, seed_ptr, strength_ptr,
        lse_ptr, key_part_ptr, anchor_ptr, power_ptr, delta_ptr, parts_ptr, dv_ptr, sums_grad_ptr,
        minus_gamma_dc_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch,
        g_head, g_row, d_batch, d_head, d_row, part_row, heads, group, length, low_plane, score_scale,
        drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2, DIM, BLOCK_DIM, ROWS, KEYS, CAREFUL, TAIL, POWER,
        RECEIVES, PRECISE, MASKED, DROPS, PRECISION,
    )  # fmt: skip


@triton.jit
def store_query_gradient(
    block, batch, head, first, tokens, q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, seed_ptr, strength_ptr, lse_ptr,
    key_part_ptr, anchor_ptr, inverse_ptr, power_ptr, delta_ptr, sums_grad_ptr, minus_gamma_dc_ptr, dq_ptr,
    strength_grad_ptr, row_term_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    g_batch, g_head, g_row, d_batch, d_head, d_row, heads, group, length, low_plane, scale, score_scale,
    drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAREFUL: tl.constexpr,
    TAIL: tl.constexpr, POWER: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ and t of a block of rows; unless PRECISE is 0 also E, the rows' parts of gamma's gradient."""
    rows = block * ROWS + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    gamma = message[0]
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    grad = load_rows(g_base, block * ROWS, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    anchor = load_anchor(anchor_ptr + row_base, rows, tokens, True, CAREFUL)
    power = load_power(power_ptr + row_base, rows, tokens, True, POWER)
    delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, True)
    norm = load_vector(inverse_ptr + row_base, rows, tokens, 0.0, True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)[:, None]
    KIND: tl.constexpr = q_ptr.dtype.element_ty
    sends = rows_real.to(KIND)
    pair = sender_pair(pair_message(message, KIND), sends, MASKED)
    along = closeness(norm).to(KIND)[:, None]
    ones = tl.full([KEYS, 16], 1.0, KIND)
    dq = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    prior_k = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    row_terms = tl.zeros([ROWS, 16], tl.float32)
    strength_grad = tl.zeros([ROWS], tl.float32)
    excess = tl.zeros([ROWS], tl.float32)  # rowsum(dT), 0 but for rounding
    overlap = tl.zeros([ROWS], tl.float32)  # P . a before P is normalised
    square = tl.zeros([ROWS], tl.float32)  # a . a
    for start in tl.range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
        keys_real = real_tokens(mask_base, keys, tokens, MASKED)[None, :]
        scores, a = prior_weights(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), high[:, None], low[:, None], keys_real,
            score_scale, TAIL or MASKED, PRECISE,
        )  # fmt: skip
        prior_k = tl.dot(a.to(KIND), k, prior_k, input_precision=PRECISION)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[:, None], keys[None, :], DROPS)
        centred = dp - delta[:, None]
        key_part = load_or_zero(key_part_ptr + row_base, keys, tokens, TAIL, RECEIVES)[None, :]
        if PRECISE == 0 and not CAREFUL:
            u = boosted(a.to(KIND), pair)
            d_logits = centred.to(KIND)
            minus_gamma_dc = tl.zeros([1, KEYS], KIND)
            if RECEIVES:
                d_logits = multiply(d_logits, multiply(a.to(KIND) if RECEIVES == 2 else u, key_part))
                minus_gamma_dc = load_vector(minus_gamma_dc_ptr + row_base, keys, tokens, 0.0, TAIL)[None, :]
            else:
                d_logits = multiply(d_logits, u)
            if MASKED:
                u = multiply(u, sends)
            gamma_d_own = minus_gamma_dc if RECEIVES == 2 else multiply_add(d_logits, pair[0], minus_gamma_dc)
            d_scores = multiply_add(u, gamma_d_own, d_logits)
            # Summed from gamma H itself, which d_scores loses to rounding where d_logits is much larger.
            row_terms = add_row_sums(
                row_terms, multiply_add(d_logits, along, multiply(u, gamma_d_own)), ones, PRECISE
            )
        else:
            inverse = sender_inverse(a, rows_real, message, PRECISE, MASKED)
            u = a * inverse
            weights = unnormalised_weights(
                scores, a if RECEIVES == 2 else u, inverse, anchor[:, None], power[:, None], key_part, RECEIVES,
                CAREFUL, POWER,
            )  # fmt: skip
            d_logits = centred * weights
            sums_grad = load_or_zero(sums_grad_ptr + row_base, keys, tokens, TAIL, RECEIVES)
            d_message = -u * sums_grad[None, :] if RECEIVES == 2 else u * (d_logits - sums_grad[None, :])
            if MASKED:
                d_message = tl.where(rows_real, d_message, 0.0)
            strength_grad += tl.sum(d_message, 1)
            excess += tl.sum(d_logits, 1)
            overlap += tl.sum(a * weights, 1)
            square += tl.sum(a * a, 1)
            d_scores = (d_logits + gamma * d_message).to(KIND)
        dq = tl.dot(d_scores, k, dq, input_precision=PRECISION)
    if PRECISE == 0 and not CAREFUL:
        row_term = tl.max(row_terms, 1)
    else:
        if POWER:
            norm /= power
        # How far P lies along a: P . a / (a . a).
        share = tl.minimum(overlap * norm / tl.maximum(square, 1e-30), 1.0)
        row_term = gamma * strength_grad + share * excess
    if PRECISE != 0:
        tl.store(strength_grad_ptr + row_base + rows, strength_grad, mask=rows < tokens)
    tl.store(row_term_ptr + row_base + rows, row_term, mask=rows < tokens)
    dq = (dq - row_term[:, None] * prior_k) * scale
    dq_base = states_base(dq_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dq_base, block * ROWS, tokens, d_row, dq, ROWS, DIM, BLOCK_DIM)


@triton.jit
def query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, inverse_ptr, power_ptr, lowest_ptr, delta_ptr, sums_grad_ptr, minus_gamma_dc_ptr,
    dq_ptr, strength_grad_ptr, row_term_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, lowest_blocks, low_plane, scale, score_scale, lowest_sum, drop_threshold,
    keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr, TAIL: tl.constexpr, POWER: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``store_query_gradient``, of the program's block, in heads that are careful if CAREFUL is."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        return
    if CHECKED:
        careful = is_careful(lowest_ptr, tl.program_id(0) // blocks, lowest_blocks, lowest_sum, LOWEST_BLOCKS)
        if careful != (1 if CAREFUL else 0):
            return
    store_query_gradient(
        block, batch, head, first, tokens, q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, seed_ptr, strength_ptr,
        lse_ptr, key_part_ptr, anchor_ptr, inverse_ptr, power_ptr, delta_ptr, sums_grad_ptr, minus_gamma_dc_ptr,
        dq_ptr, strength_grad_ptr, row_term_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head,
        v_row, g_batch, g_head, g_row, d_batch, d_head, d_row, heads, group, length, low_plane, scale, score_scale,
        drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2, DIM, BLOCK_DIM, ROWS, KEYS, CAREFUL, TAIL, POWER,
        RECEIVES, PRECISE, MASKED, DROPS, PRECISION,
    )  # fmt: skip


@triton.jit
def store_key_gradient(
    block, batch, head, first, tokens, q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, seed_ptr, strength_ptr, lse_ptr,
    key_part_ptr, anchor_ptr, power_ptr, delta_ptr, sums_grad_ptr, row_term_ptr, dk_ptr, q_batch, q_head, q_row,
    k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row, d_batch, d_head, d_row, heads, group,
    length, low_plane, scale, score_scale, drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAREFUL: tl.constexpr,
    TAIL: tl.constexpr, POWER: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys."""
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    gamma = message[0]
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    key_part = load_or_zero(key_part_ptr + row_base, keys, tokens, True, RECEIVES).to(tl.float32)[:, None]
    sums_grad = load_or_zero(sums_grad_ptr + row_base, keys, tokens, True, RECEIVES)[:, None]
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    for start in tl.range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        grad = load_rows(g_base, start, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, TAIL)
        anchor = load_anchor(anchor_ptr + row_base, rows, tokens, TAIL, CAREFUL)
        power = load_power(power_ptr + row_base, rows, tokens, TAIL, POWER)
        delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, TAIL)
        row_term = load_vector(row_term_ptr + row_base, rows, tokens, 0.0, TAIL)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)[None, :]
        scores, a = prior_weights(
            tl.dot(k, tl.trans(q), input_precision=PRECISION), high[None, :], low[None, :], rows_real,
            score_scale, False, PRECISE,
        )  # fmt: skip
        inverse = sender_inverse(a, rows_real, message, PRECISE, MASKED)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[None, :], keys[:, None], DROPS)
        centred = dp - delta[None, :]
        if PRECISE == 0 and RECEIVES == 2 and not CAREFUL and not MASKED:
            d_scores = a * (key_part * centred - gamma * inverse * sums_grad - row_term[None, :])
        elif PRECISE == 0 and RECEIVES and not CAREFUL and not MASKED:
            # The same in fewer operations: 1 + gamma u is the inverse message.
            d_scores = a * (inverse * (inverse * key_part * centred - gamma * sums_grad) - row_term[None, :])
        else:
            u = a * inverse
            d_logits = centred * unnormalised_weights(
                scores, a if RECEIVES == 2 else u, inverse, anchor[None, :], power[None, :], key_part, RECEIVES,
                CAREFUL, POWER,
            )  # fmt: skip
            d_message = -u * sums_grad if RECEIVES == 2 else u * (d_logits - sums_grad)
            if MASKED:
                d_message = tl.where(rows_real, d_message, 0.0)
            d_scores = d_logits + gamma * d_message - a * row_term[None, :]
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    dk = tl.where(keys_real[:, None], dk * scale, 0.0)
    dk_base = states_base(dk_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dk_base, block * KEYS, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)


@triton.jit
def key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, power_ptr, lowest_ptr, delta_ptr, sums_grad_ptr, row_term_ptr, dk_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, lowest_blocks, low_plane, scale, score_scale, lowest_sum, drop_threshold,
    keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr, TAIL: tl.constexpr, POWER: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``store_key_gradient``, of the program's block, in heads that are careful if CAREFUL is."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    if CHECKED:
        careful = is_careful(lowest_ptr, tl.program_id(0) // blocks, lowest_blocks, lowest_sum, LOWEST_BLOCKS)
        if careful != (1 if CAREFUL else 0):
            return
    store_key_gradient(
        block, batch, head, first, tokens, q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, seed_ptr, strength_ptr,
        lse_ptr, key_part_ptr, anchor_ptr, power_ptr, delta_ptr, sums_grad_ptr, row_term_ptr, dk_ptr, q_batch,
        q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row, d_batch, d_head,
        d_row, heads, group, length, low_plane, scale, score_scale, drop_threshold, keep_scale, sign, r0, r1, r2,
        l0, l1, l2, DIM, BLOCK_DIM, ROWS, KEYS, CAREFUL, TAIL, POWER, RECEIVES, PRECISE, MASKED, DROPS, PRECISION,
    )  # fmt: skip

"""Gradients of short strict causal attention in one launch; the letters are those of ``causal_backward``.

The whole map is at hand and is worked out once more, so nothing but the inputs is kept. D, sums over later rows and E
are sums of what is used: in collapsed heads gradients are what is left after large terms cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.arithmetic import (
    head_message,
    head_seed,
    kept,
    load_rows,
    locate,
    real_tokens,
    states_base,
    store_rows,
)
from saobp.kernels.causal import smaller
from saobp.kernels.causal_backward import message_gradient
from saobp.kernels.pairs import rounded
from saobp.kernels.short import inverse_or_zero
from saobp.kernels.short_causal import refined_rows


@triton.jit
def dropped_weights(
    refined, d_rows, rows, keys, seed, drop_threshold, keep_scale, KIND: tl.constexpr, DROPS: tl.constexpr
):  # fmt: skip
    """Weights as they meet values, in the type KIND, and gradients as they come back through dropout."""
    if DROPS:
        keep = kept(seed, rows[:, None], keys[None, :], drop_threshold)
        d_rows = tl.where(keep, d_rows * keep_scale, 0.0)
        return rounded(tl.where(keep, refined * keep_scale, 0.0), KIND), d_rows
    else:
        return rounded(refined, KIND), d_rows


@triton.jit
def belief_gradients(
    refined, refined_before, grad, v, v_before, start, seed, drop_threshold, keep_scale,
    BEFORE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dT of a part's rows, on its own keys and on those BEFORE, and the weights that gradients of values are made of."""
    local = tl.arange(0, grad.shape[0])
    rows = start + local
    total = tl.sum(refined, 1)
    if BEFORE:
        total += tl.sum(refined_before, 1)
    inverse = inverse_or_zero(total, MASKED)[:, None]
    refined *= inverse
    refined_before *= inverse
    d_rows = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    dropped, d_rows = dropped_weights(
        refined, d_rows, rows, rows, seed, drop_threshold, keep_scale, grad.dtype, DROPS
    )
    delta = tl.sum(refined * d_rows, 1)
    if BEFORE:
        d_before = tl.dot(grad, tl.trans(v_before), input_precision=PRECISION)
        dropped_before, d_before = dropped_weights(
            refined_before, d_before, rows, local, seed, drop_threshold, keep_scale, grad.dtype, DROPS
        )
        delta += tl.sum(refined_before * d_before, 1)
        return (
            refined * (d_rows - delta[:, None]), refined_before * (d_before - delta[:, None]), dropped, dropped_before
        )  # fmt: skip
    else:
        d_beliefs = refined * (d_rows - delta[:, None])
        return d_beliefs, d_beliefs, dropped, dropped


@triton.jit
def sums_of_later(d_beliefs, later, KIND: tl.constexpr, HEARS: tl.constexpr):
    """g: of every row and key the sum of dT over the rows that hear it; ``later`` is that of rows of later parts."""
    if HEARS:
        earlier = smaller(d_beliefs.shape[0], KIND)
        return tl.dot(earlier, rounded(d_beliefs, KIND), input_precision="ieee") + later[None, :]
    else:
        return -d_beliefs


@triton.jit
def score_gradients(
    a, a_before, d_beliefs, d_before, later, rows_real, message,
    BEFORE: tl.constexpr, KIND: tl.constexpr, HEARS: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dS of a part's rows, on its own keys and on those BEFORE, rounded to KIND, and E."""
    gamma = message[0]
    g = sums_of_later(d_beliefs, later, KIND, HEARS)
    d_message = message_gradient(a, g, rows_real[:, None], message, PRECISE, MASKED)
    strength_grad = tl.sum(d_message, 1)
    if BEFORE:
        g = sums_of_later(d_before, later, KIND, HEARS)
        d_message_before = message_gradient(a_before, g, rows_real[:, None], message, PRECISE, MASKED)
        strength_grad += tl.sum(d_message_before, 1)
        d_before += gamma * (d_message_before - a_before * strength_grad[:, None])
    d_beliefs += gamma * (d_message - a * strength_grad[:, None])
    return rounded(d_beliefs, KIND), rounded(d_before, KIND), strength_grad


@triton.jit
def short_causal_backward(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr, dq_ptr, dk_ptr, dv_ptr, strength_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, scale, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, TAIL: tl.constexpr,
    HEARS: tl.constexpr, CAREFUL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one head, and the gradient of its gamma row by row; parts of rows as in ``short_causal``."""
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    rows = tl.arange(0, ROWS)
    KIND: tl.constexpr = q_ptr.dtype.element_ty
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = states_base(q_ptr, batch64, head, first64, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch64, head // group, first64, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch64, head // group, first64, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch64, head, first64, g_batch, g_head, g_row)
    d_offset = batch64 * d_batch + head.to(tl.int64) * d_head + first64 * d_row
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    seed = tl.zeros([], tl.uint32)
    if DROPS:
        seed = head_seed(seed_ptr, row_base)
    q = load_rows(q_base, 0, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
    k = load_rows(k_base, 0, tokens, k_row, ROWS, DIM, BLOCK_DIM, TAIL)
    v = load_rows(v_base, 0, tokens, v_row, ROWS, DIM, BLOCK_DIM, TAIL)
    grad = load_rows(g_base, 0, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
    real = real_tokens(mask_base, rows, tokens, MASKED)
    later = tl.zeros([ROWS], tl.float32)
    a, _, refined, _, past = refined_rows(
        q, k, k, real, real, later, message, score_scale, False, HEARS, CAREFUL, PRECISE, MASKED, PRECISION
    )
    d_beliefs, _, weights, _ = belief_gradients(
        refined, refined, grad, v, v, 0, seed, drop_threshold, keep_scale, False, MASKED, DROPS, PRECISION
    )
    dv = tl.dot(tl.trans(weights), grad, input_precision=PRECISION)
    dk = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    if SPLIT:
        q_2 = load_rows(q_base, ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        k_2 = load_rows(k_base, ROWS, tokens, k_row, ROWS, DIM, BLOCK_DIM, TAIL)
        v_2 = load_rows(v_base, ROWS, tokens, v_row, ROWS, DIM, BLOCK_DIM, TAIL)
        grad_2 = load_rows(g_base, ROWS, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        real_2 = real_tokens(mask_base, ROWS + rows, tokens, MASKED)
        a_2, a_21, refined_2, refined_21, _ = refined_rows(
            q_2,
            k_2,
            k,
            real_2,
            real,
            past,
            message,
            score_scale,
            True,
            HEARS,
            CAREFUL,
            PRECISE,
            MASKED,
            PRECISION,
        )
        d_beliefs_2, d_beliefs_21, weights_2, weights_21 = belief_gradients(
            refined_2,
            refined_21,
            grad_2,
            v_2,
            v,
            ROWS,
            seed,
            drop_threshold,
            keep_scale,
            True,
            MASKED,
            DROPS,
            PRECISION,
        )
        dv_2 = tl.dot(tl.trans(weights_2), grad_2, input_precision=PRECISION)
        store_rows(dv_ptr + d_offset, ROWS, tokens, d_row, dv_2, ROWS, DIM, BLOCK_DIM)
        dv = tl.dot(tl.trans(weights_21), grad_2, dv, input_precision=PRECISION)
        d_scores_2, d_scores_21, strength_grad_2 = score_gradients(
            a_2, a_21, d_beliefs_2, d_beliefs_21, later, real_2, message, True, KIND, HEARS, PRECISE, MASKED
        )
        later = tl.sum(d_beliefs_21, 0)
        strength_grad_base = strength_grad_ptr + row_base + ROWS
        tl.store(strength_grad_base + rows, strength_grad_2, mask=ROWS + rows < tokens)
        dq_2 = tl.dot(d_scores_2, k_2, input_precision=PRECISION)
        dq_2 = tl.dot(d_scores_21, k, dq_2, input_precision=PRECISION) * scale
        store_rows(dq_ptr + d_offset, ROWS, tokens, d_row, dq_2, ROWS, DIM, BLOCK_DIM)
        dk_2 = tl.dot(tl.trans(d_scores_2), q_2, input_precision=PRECISION) * scale
        store_rows(dk_ptr + d_offset, ROWS, tokens, d_row, dk_2, ROWS, DIM, BLOCK_DIM)
        dk = tl.dot(tl.trans(d_scores_21), q_2, input_precision=PRECISION)
    store_rows(dv_ptr + d_offset, 0, tokens, d_row, dv, ROWS, DIM, BLOCK_DIM)
    d_scores, _, strength_grad = score_gradients(
        a, a, d_beliefs, d_beliefs, later, real, message, False, KIND, HEARS, PRECISE, MASKED
    )
    tl.store(strength_grad_ptr + row_base + rows, strength_grad, mask=rows < tokens)
    dq = tl.dot(d_scores, k, input_precision=PRECISION) * scale
    store_rows(dq_ptr + d_offset, 0, tokens, d_row, dq, ROWS, DIM, BLOCK_DIM)
    dk = tl.dot(tl.trans(d_scores), q, dk, input_precision=PRECISION) * scale
    store_rows(dk_ptr + d_offset, 0, tokens, d_row, dk, ROWS, DIM, BLOCK_DIM)

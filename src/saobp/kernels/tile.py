"""Short sequences: one program holds a head's whole map, so scores are computed once. Not causal."""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.arithmetic import (
    head_message,
    head_seed,
    inverse_message,
    kept,
    load_rows,
    locate,
    log2_message,
    real_tokens,
    store_rows,
)


@triton.jit
def _priors(q, k, keys_real, score_scale, PRECISION: tl.constexpr):
    """Softmax rows ``[BLOCK, BLOCK]`` in float32, and which of them see a key."""
    scores = tl.where(keys_real[None, :], tl.dot(q, tl.trans(k), input_precision=PRECISION), float("-inf"))
    top = tl.max(scores, 1)
    a = tl.exp2((scores - tl.where(top == float("-inf"), 0.0, top)[:, None]) * score_scale)
    total = tl.sum(a, 1)
    return a * tl.where(total > 0, 1.0 / total, 0.0)[:, None], total > 0


@triton.jit
def _inverse(a, rows_real, message, PRECISE: tl.constexpr, MASKED: tl.constexpr):
    inverse = inverse_message(a, message, PRECISE)
    if MASKED:
        inverse = tl.where(rows_real[:, None], inverse, 1.0)
    return inverse


@triton.jit
def _beliefs(
    a, visible, q, k, real, score_scale, message, lowest_sum,
    HEARS: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Refined rows ``[BLOCK, BLOCK]`` from their priors."""
    refined = a * _inverse(a, real, message, PRECISE, MASKED)
    if HEARS:
        heard = tl.sum(tl.where(real[:, None], log2_message(a, message, PRECISE), 0.0), 0)
        heard = tl.where(real, heard, float("-inf"))
        peak = tl.max(heard, 0)
        heard -= tl.where(peak == float("-inf"), 0.0, peak)
        refined *= tl.exp2(heard)[None, :]
        z = tl.sum(refined, 1)
        # A row whose whole weight sits on a key that the others shun underflows: redo it with logarithms.
        if tl.min(tl.where(visible, z, 1.0)) < lowest_sum:
            exponent = tl.where(real[None, :], tl.dot(q, tl.trans(k), input_precision=PRECISION), float("-inf"))
            exponent = (exponent - tl.max(exponent, 1)[:, None]) * score_scale + heard[None, :]
            exponent -= tl.max(exponent, 1)[:, None]
            refined = tl.exp2(exponent) * _inverse(a, real, message, PRECISE, MASKED)
            refined = tl.where(visible[:, None], refined, 0.0)
            z = tl.sum(refined, 1)
    else:
        z = tl.sum(refined, 1)
    return refined * tl.where(z > 0, 1.0 / z, 0.0)[:, None]


@triton.jit
def tile_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, gamma_ptr, mask_ptr, cu_ptr, seed_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, score_scale, lowest_sum, drop_threshold, keep_scale, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr, HEARS: tl.constexpr, PRECISE: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of one head of one sequence of at most BLOCK tokens."""
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    places = tl.arange(0, BLOCK)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = q_ptr + batch64 * q_batch + head * q_head + first64 * q_row
    k_base = k_ptr + batch64 * k_batch + (head // group) * k_head + first64 * k_row
    v_base = v_ptr + batch64 * v_batch + (head // group) * v_head + first64 * v_row
    real = real_tokens(mask_ptr + batch64 * length, places, tokens, MASKED)
    q = load_rows(q_base, 0, tokens, q_row, BLOCK, DIM, BLOCK_DIM, True)
    k = load_rows(k_base, 0, tokens, k_row, BLOCK, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, 0, tokens, v_row, BLOCK, DIM, BLOCK_DIM, True)
    message = head_message(gamma_ptr, head, r0, r1, r2, l0, l1, l2)
    a, visible = _priors(q, k, real, score_scale, PRECISION)
    refined = _beliefs(a, visible, q, k, real, score_scale, message, lowest_sum, HEARS, PRECISE, MASKED, PRECISION)
    if DROPS:
        row_base = (batch64 * heads + head) * length + first64
        keep = kept(head_seed(seed_ptr, row_base), places[:, None], places[None, :], drop_threshold)
        refined = tl.where(keep, refined * keep_scale, 0.0)
    out = tl.dot(refined.to(v.dtype), v, input_precision=PRECISION)
    store_rows(out_ptr + batch64 * o_batch + head * o_head + first64 * o_row, 0, tokens, o_row, out, BLOCK, DIM, BLOCK_DIM)


@triton.jit
def tile_backward(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, gamma_ptr, mask_ptr, cu_ptr, seed_ptr,
    dq_ptr, dk_ptr, dv_ptr, dgamma_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, scale, score_scale, lowest_sum, drop_threshold, keep_scale, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr, HEARS: tl.constexpr, PRECISE: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one head of one sequence; dq, dk, dv share one layout with a head of keys per query head."""
    pid = tl.program_id(0)
    _, batch, head, first, tokens = locate(pid, 1, heads, length, cu_ptr, PACKED)
    places = tl.arange(0, BLOCK)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = q_ptr + batch64 * q_batch + head * q_head + first64 * q_row
    k_base = k_ptr + batch64 * k_batch + (head // group) * k_head + first64 * k_row
    v_base = v_ptr + batch64 * v_batch + (head // group) * v_head + first64 * v_row
    o_base = out_ptr + batch64 * o_batch + head * o_head + first64 * o_row
    g_base = grad_ptr + batch64 * g_batch + head * g_head + first64 * g_row
    d_offset = batch64 * d_batch + head * d_head + first64 * d_row
    real = real_tokens(mask_ptr + batch64 * length, places, tokens, MASKED)
    q = load_rows(q_base, 0, tokens, q_row, BLOCK, DIM, BLOCK_DIM, True)
    k = load_rows(k_base, 0, tokens, k_row, BLOCK, DIM, BLOCK_DIM, True)
    message = head_message(gamma_ptr, head, r0, r1, r2, l0, l1, l2)
    a, visible = _priors(q, k, real, score_scale, PRECISION)
    refined = _beliefs(a, visible, q, k, real, score_scale, message, lowest_sum, HEARS, PRECISE, MASKED, PRECISION)
    grad = load_rows(g_base, 0, tokens, g_row, BLOCK, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, 0, tokens, v_row, BLOCK, DIM, BLOCK_DIM, True)
    out = load_rows(o_base, 0, tokens, o_row, BLOCK, DIM, BLOCK_DIM, True)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    d_rows = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    if DROPS:
        row_base = (batch64 * heads + head) * length + first64
        keep = kept(head_seed(seed_ptr, row_base), places[:, None], places[None, :], drop_threshold)
        d_rows = tl.where(keep, d_rows * keep_scale, 0.0)
        used = tl.where(keep, refined * keep_scale, 0.0)
        dv = tl.dot(tl.trans(used.to(grad.dtype)), grad, input_precision=PRECISION)
    else:
        dv = tl.dot(tl.trans(refined.to(grad.dtype)), grad, input_precision=PRECISION)
    store_rows(dv_ptr + d_offset, 0, tokens, d_row, dv, BLOCK, DIM, BLOCK_DIM)
    d_logits = refined * (d_rows - delta[:, None])
    heard_grad = tl.zeros([BLOCK], tl.float32)
    if HEARS:
        heard_grad = tl.sum(d_logits, 0)
    d_message = a * _inverse(a, real, message, PRECISE, MASKED) * (d_logits - heard_grad[None, :])
    d_message = tl.where(real[:, None], d_message, 0.0)
    d_strength = tl.sum(d_message, 1)
    tl.store(dgamma_ptr + pid, tl.sum(d_strength, 0))
    gamma = tl.load(gamma_ptr + head)
    d_scores = (d_logits + gamma * d_message) - a * (gamma * d_strength)[:, None]
    d_scores = (d_scores * scale).to(q.dtype)
    dq = tl.dot(d_scores, k, input_precision=PRECISION)
    store_rows(dq_ptr + d_offset, 0, tokens, d_row, dq, BLOCK, DIM, BLOCK_DIM)
    dk = tl.dot(tl.trans(d_scores), q, input_precision=PRECISION)
    store_rows(dk_ptr + d_offset, 0, tokens, d_row, dk, BLOCK, DIM, BLOCK_DIM)

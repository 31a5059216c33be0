# mypy: ignore-errors
"""Several steps on short sequences: a program holds the whole map of one head; one launch forward, one backward.

The formulas and names of ``entries`` and ``backward``, in the log domain; sums over rows and keys are taken from the map.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.sums import raw_scores
from saobp.kernels.library.arithmetic import (
    drop,
    drop_scaled,
    finite,
    head_dropout,
    inverse_message,
    load_lse,
    load_rows,
    log2_message,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate, row_bases, states_base
from saobp.kernels.steps.backward import d_belief_before, logit_gradient, message_gradient
from saobp.kernels.steps.entries import head_messages, mix, row_messages


@triton.jit
def softmax_rows(logits):
    """Softmax to base 2 over keys; 0 in rows that see no key."""
    weights = tl.exp2(logits - finite(tl.max(logits, 1))[:, None])
    total = tl.sum(weights, 1)
    return weights * tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)[:, None]


@triton.jit
def whole_step(log_prior, belief, message, RECEIVES: tl.constexpr, PRECISE: tl.constexpr):
    """u_t of all rows from b_t."""
    sent = log2_message(belief, message, PRECISE)
    if RECEIVES == 1:
        logits = log_prior + (tl.sum(sent, 0)[None, :] - sent)
    elif RECEIVES == 2:
        logits = log_prior + tl.sum(sent, 0)[None, :]
    else:
        logits = log_prior - sent
    return softmax_rows(logits)


@triton.jit
def short_steps_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr, lse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, score_scale, drop_threshold, keep_scale, damping, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    STEPS: tl.constexpr, DAMPED: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of one head of one sequence of at most KEYS tokens, and the rows' log-sum-exp."""
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    places = tl.arange(0, KEYS)
    KIND: tl.constexpr = v_ptr.dtype.element_ty
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    real = real_tokens(mask_base, places, tokens, MASKED)
    by_head = head_messages(strength_ptr, head, heads, sign, r0, r1, r2, l0, l1, l2, STEPS)
    messages = row_messages(by_head, real[:, None], STEPS, MASKED or TAIL)
    q = load_rows(q_base, 0, tokens, q_row, KEYS, DIM, BLOCK_DIM, TAIL)
    k = load_rows(k_base, 0, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
    scores = raw_scores(q, k, real, TAIL or MASKED, PRECISION) * score_scale
    top = finite(tl.max(scores, 1))
    total = tl.sum(tl.exp2(scores - top[:, None]), 1)
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
    tl.store(lse_ptr + row_base + places, lse, mask=places < tokens)
    log_prior = scores - lse[:, None]
    belief = tl.exp2(log_prior)
    for step in tl.static_range(STEPS):
        updated = whole_step(log_prior, belief, messages[step], RECEIVES, PRECISE)
        belief = mix(updated, belief, damping, PRECISE, DAMPED)
    refined = belief.to(KIND)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    refined = drop(refined, dropout, places[:, None], places[None, :], DROPS)
    v = load_rows(v_base, 0, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
    out = tl.dot(refined, v, input_precision=PRECISION)
    if DROPS:
        out *= keep_scale
    out_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    store_rows(out_base, 0, tokens, o_row, out, KEYS, DIM, BLOCK_DIM)


@triton.jit
def short_steps_backward(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr, lse_ptr, dq_ptr, dk_ptr, dv_ptr, strength_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row, d_batch, d_head, d_row,
    heads, group, length, scale, score_scale, drop_threshold, keep_scale, damping, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    STEPS: tl.constexpr, DAMPED: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr, DROPS: tl.constexpr, LEARNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one head; if strengths learn also the rows' parts of each step's d gamma."""
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    places = tl.arange(0, KEYS)
    KIND: tl.constexpr = q_ptr.dtype.element_ty
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    real = real_tokens(mask_base, places, tokens, MASKED)
    by_head = head_messages(strength_ptr, head, heads, sign, r0, r1, r2, l0, l1, l2, STEPS)
    messages = row_messages(by_head, real[:, None], STEPS, MASKED or TAIL)
    q = load_rows(q_base, 0, tokens, q_row, KEYS, DIM, BLOCK_DIM, TAIL)
    k = load_rows(k_base, 0, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
    scores = raw_scores(q, k, real, TAIL or MASKED, PRECISION) * score_scale
    lse, _ = load_lse(lse_ptr + row_base, 0, places, tokens, 1, True)
    log_prior = scores - lse[:, None]
    a = tl.exp2(log_prior)
    before, updated = (), ()
    belief = a
    for step in tl.static_range(STEPS):
        new = whole_step(log_prior, belief, messages[step], RECEIVES, PRECISE)
        before, updated = before + (belief,), updated + (new,)
        belief = mix(new, belief, damping, PRECISE, DAMPED)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    grad = load_rows(g_base, 0, tokens, g_row, KEYS, DIM, BLOCK_DIM, TAIL)
    refined = drop(belief.to(KIND), dropout, places[:, None], places[None, :], DROPS)
    dv = tl.dot(tl.trans(refined), grad, input_precision=PRECISION)
    if DROPS:
        dv *= keep_scale
    dv_base = states_base(dv_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dv_base, 0, tokens, d_row, tl.where(real[:, None], dv, 0.0), KEYS, DIM, BLOCK_DIM)

    v = load_rows(v_base, 0, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
    d_belief = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    d_belief = drop_scaled(d_belief, dropout, places[:, None], places[None, :], DROPS)
    strength_base = head_base(strength_grad_ptr, batch, head, first, heads * STEPS, length)
    d_scores = tl.zeros([KEYS, KEYS], tl.float32)
    for back in tl.static_range(STEPS):
        delta = tl.sum(updated[STEPS - 1 - back] * d_belief, 1)
        if DAMPED:
            delta *= 1.0 - damping
        d_logits = logit_gradient(d_belief, updated[STEPS - 1 - back], delta[:, None], damping, DAMPED)
        d_scores += d_logits
        inverse = inverse_message(before[STEPS - 1 - back], messages[STEPS - 1 - back], PRECISE)
        d_message = message_gradient(d_logits, inverse, tl.sum(d_logits, 0)[None, :], RECEIVES)
        if LEARNS:
            gamma_parts = tl.where(real, tl.sum(before[STEPS - 1 - back] * d_message, 1), 0.0)
            step_base = strength_base + (STEPS - 1 - back) * heads * length
            tl.store(step_base + places, gamma_parts, mask=places < tokens)
        d_belief = d_belief_before(d_belief, d_message, messages[STEPS - 1 - back][0], damping, DAMPED)
    d_scores += a * (d_belief - tl.sum(a * d_belief, 1)[:, None])
    d_scores *= scale
    rounded = d_scores.to(KIND)
    dq = tl.dot(rounded, k, input_precision=PRECISION)
    if k.dtype == tl.bfloat16:
        # Keys of a collapsed head are alike, and the rows of d_scores sum to 0: dq is a small difference of large terms.
        dq = tl.dot((d_scores - rounded.to(tl.float32)).to(KIND), k, dq, input_precision=PRECISION)
    dk = tl.dot(tl.trans(rounded), q, input_precision=PRECISION)
    dq_base = states_base(dq_ptr, batch, head, first, d_batch, d_head, d_row)
    dk_base = states_base(dk_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dq_base, 0, tokens, d_row, dq, KEYS, DIM, BLOCK_DIM)
    store_rows(dk_base, 0, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)

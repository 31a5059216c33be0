# mypy: ignore-errors
"""Gradients of short strict causal attention in one launch; notation of ``backward.py``.

The whole map is recomputed in registers, later rows first, since earlier ones need sums over them. D, those sums and E
are sums of the values used: in collapsed heads gradients are what is left after large terms cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.short import inverse_or_zero
from saobp.kernels.causal.backward import message_gradient
from saobp.kernels.causal.forward import upper_triangle
from saobp.kernels.causal.short_forward import refined_rows
from saobp.kernels.library.arithmetic import (
    drop_scaled,
    head_dropout,
    head_message,
    load_rows,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import locate, row_bases, states_base
from saobp.kernels.library.packed_bf16 import rounded
from saobp.kernels.library.prefetch import prefetch_rows


@triton.jit
def value_weights(
    refined, rows, keys, dropout, KIND: tl.constexpr, DROPS: tl.constexpr
):  # fmt: skip
    """Transpose of the weights that multiply values, after dropout, in the type KIND."""
    refined = drop_scaled(refined, dropout, rows[:, None], keys[None, :], DROPS)
    return tl.trans(rounded(refined, KIND))


@triton.jit
def weight_gradients(
    grad, v, rows, keys, dropout, DROPS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """dP = dO V^T of a tile ``[rows, keys]``, back through dropout."""
    dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    return drop_scaled(dp, dropout, rows[:, None], keys[None, :], DROPS)


@triton.jit
def message_gradients(
    a, d_beliefs, later, rows_real, message,
    LAST: tl.constexpr, KIND: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dT + gamma H of a tile ``[rows, keys]``, and its part of E; if not LAST, ``later`` is the sum of dT over the second part's rows."""
    if RECEIVES:
        receivers = upper_triangle(d_beliefs.shape[0], KIND, RECEIVES == 2)
        g = tl.dot(receivers, rounded(d_beliefs, KIND), input_precision="ieee")
        if not LAST:
            g += later[None, :]
    else:
        g = -d_beliefs
    d_message = message_gradient(a, g, rows_real[:, None], message, PRECISE, MASKED)
    return d_beliefs + message[0] * d_message, tl.sum(d_message, 1)


@triton.jit
def part_gradients(
    dk, dv, later, past, q, k, v, grad, k_before, v_before, real, before_real, start, tokens, message,
    dq_base, dk_base, dv_base, d_row, strength_grad_base, scale, score_scale, dropout,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BEFORE: tl.constexpr, RECEIVES: tl.constexpr, CAREFUL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores dQ and E of a part's rows, and dK and dV of its keys, with those of the second part's rows added.

    Returns the part's contributions to keys BEFORE it: dK, dV and the sum of dT.
    """
    ROWS: tl.constexpr = q.shape[0]
    KIND: tl.constexpr = q.dtype
    local = tl.arange(0, ROWS)
    rows = start + local
    a, a_before, refined, refined_before, _ = refined_rows(
        q, k, k_before, real, before_real, past, message, score_scale,
        BEFORE, RECEIVES, CAREFUL, PRECISE, MASKED, PRECISION,
    )  # fmt: skip
    total = tl.sum(refined, 1)
    if BEFORE:
        total += tl.sum(refined_before, 1)
    inverse = inverse_or_zero(total, MASKED)[:, None]
    refined *= inverse
    weights = value_weights(refined, rows, rows, dropout, KIND, DROPS)
    dv = tl.dot(weights, grad, dv, input_precision=PRECISION)
    store_rows(dv_base, start, tokens, d_row, dv, ROWS, DIM, BLOCK_DIM)
    if BEFORE:
        refined_before *= inverse
        weights = value_weights(refined_before, rows, local, dropout, KIND, DROPS)

    d_beliefs = weight_gradients(grad, v, rows, rows, dropout, DROPS, PRECISION)
    delta = tl.sum(refined * d_beliefs, 1)
    if BEFORE:
        d_before = weight_gradients(grad, v_before, rows, local, dropout, DROPS, PRECISION)
        delta += tl.sum(refined_before * d_before, 1)
        d_before = refined_before * (d_before - delta[:, None])
    d_beliefs = refined * (d_beliefs - delta[:, None])

    # A new value to the compiler, which otherwise keeps 1 - gamma a of the whole map live in registers.
    gamma, r0, r1, r2, l0, l1, l2 = message
    message = (gamma + 0.0 * score_scale, r0, r1, r2, l0, l1, l2)
    d_scores, strength_grad = message_gradients(
        a, d_beliefs, later, real, message, BEFORE, KIND, RECEIVES, PRECISE, MASKED
    )
    if BEFORE:
        later = tl.sum(d_before, 0)
        d_before, other = message_gradients(
            a_before, d_before, later, real, message, True, KIND, RECEIVES, PRECISE, MASKED
        )
        strength_grad += other
    tl.store(strength_grad_base + rows, strength_grad, mask=rows < tokens)
    row_term = (message[0] * strength_grad)[:, None]
    d_scores = rounded(d_scores - a * row_term, KIND)
    dq = tl.dot(d_scores, k, input_precision=PRECISION)
    dk = tl.dot(tl.trans(d_scores), q, dk, input_precision=PRECISION) * scale
    store_rows(dk_base, start, tokens, d_row, dk, ROWS, DIM, BLOCK_DIM)
    if BEFORE:
        d_scores = rounded(d_before - a_before * row_term, KIND)
        dq = tl.dot(d_scores, k_before, dq, input_precision=PRECISION)
        dk = tl.dot(tl.trans(d_scores), q, input_precision=PRECISION)
        dv = tl.dot(weights, grad, input_precision=PRECISION)
    store_rows(dq_base, start, tokens, d_row, dq * scale, ROWS, DIM, BLOCK_DIM)
    return dk, dv, later


@triton.jit
def short_causal_backward(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr, past_ptr,
    dq_ptr, dk_ptr, dv_ptr, strength_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, scale, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, TAIL: tl.constexpr,
    RECEIVES: tl.constexpr, CAREFUL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one head, and the gradient of its gamma per row; parts of rows as in ``short_forward.py``."""
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    rows = tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    d_base = states_base(0, batch, head, first, d_batch, d_head, d_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    k = load_rows(k_base, 0, tokens, k_row, ROWS, DIM, BLOCK_DIM, TAIL)
    v = load_rows(v_base, 0, tokens, v_row, ROWS, DIM, BLOCK_DIM, TAIL)
    real = real_tokens(mask_base, rows, tokens, MASKED)
    dk = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    dv = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    later = tl.zeros([ROWS], tl.float32)
    past = tl.zeros([ROWS], tl.float32)
    if SPLIT:
        # Loaded earlier, they would take the shared memory of a second program on the multiprocessor.
        prefetch_rows(q_base, tokens, q_row, ROWS)
        prefetch_rows(g_base, tokens, g_row, ROWS)
        if RECEIVES:
            past = tl.load(past_ptr + tl.program_id(0) * ROWS + rows)
        q = load_rows(q_base, ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        own_k = load_rows(k_base, ROWS, tokens, k_row, ROWS, DIM, BLOCK_DIM, TAIL)
        own_v = load_rows(v_base, ROWS, tokens, v_row, ROWS, DIM, BLOCK_DIM, TAIL)
        grad = load_rows(g_base, ROWS, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        own_real = real_tokens(mask_base, ROWS + rows, tokens, MASKED)
        dk, dv, later = part_gradients(
            dk, dv, later, past, q, own_k, own_v, grad, k, v, own_real, real, ROWS, tokens, message,
            dq_ptr + d_base, dk_ptr + d_base, dv_ptr + d_base, d_row, strength_grad_ptr + row_base,
            scale, score_scale, dropout,
            DIM, BLOCK_DIM, True, RECEIVES, CAREFUL, PRECISE, MASKED, DROPS, PRECISION,
        )  # fmt: skip
    q = load_rows(q_base, 0, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
    grad = load_rows(g_base, 0, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
    part_gradients(
        dk, dv, later, past, q, k, v, grad, k, v, real, real, 0, tokens, message,
        dq_ptr + d_base, dk_ptr + d_base, dv_ptr + d_base, d_row, strength_grad_ptr + row_base,
        scale, score_scale, dropout,
        DIM, BLOCK_DIM, False, RECEIVES, CAREFUL, PRECISE, MASKED, DROPS, PRECISION,
    )  # fmt: skip

# mypy: ignore-errors
"""Key bias from a part of the rows, gradients: two sweeps over all rows and two over the sending ones, no atomics.

With P the refined rows, D = rowsum(dO * O), dT = P * (dP - D), dP = dO V^T, and for a sending row u = a / (1 - gamma a) and
h = u dc, where dc = rows_per_sender sum_j dT (``library.senders``):

1. ``row_products`` of ``masked.backward``: D, with the rounding error of O (``rest``) added back, which strong attraction
   would magnify.
2. ``key_value_gradient`` (over keys, all rows): dV = P^T dO, dc, and the part of dK that does not go through messages.
3. ``sender_query_gradient`` (over sending rows): S = rowsum(h), gamma (S a - h) K, their part of dQ through messages.
4. ``query_gradient`` (over all rows): dQ = dT K, with that part added.
5. ``sender_key_gradient`` (over keys, sending rows): adds gamma (S a - h)^T Q to dK.

The derivative with respect to gamma is the sum of -S.

Names in the code: ``delta`` is D, ``dp`` dP, ``d_logits`` dT, ``sums_grad`` dc, ``row_term`` S.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.gradient_terms import prior_weights
from saobp.kernels.library.arithmetic import (
    drop,
    drop_scaled,
    head_dropout,
    head_message,
    inverse_message,
    load_lse,
    load_rows,
    load_vector,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate, row_bases, states_base
from saobp.kernels.library.senders import load_senders, sender_places, sending_rows


@triton.jit
def biased_weights(raw, bias, high, low, score_scale, PRECISE: tl.constexpr):
    """Refined weights of a tile; ``bias`` of keys and log normalisers of rows are shaped to broadcast."""
    if PRECISE == 2:
        return tl.exp2(((raw * score_scale + bias) - high) - low)
    return tl.exp2(raw * score_scale + (bias - high))


@triton.jit
def key_value_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, senders_ptr, seed_ptr, message_sums_ptr, belief_ptr, delta_ptr,
    dk_ptr, dv_ptr, sums_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, low_plane, scale, score_scale, drop_threshold, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """dV and dc of a block of keys, and the part of dK that does not go through messages."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    begin = block * KEYS
    keys = begin + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    d_base = states_base(0, batch, head, first, d_batch, d_head, d_row)
    row_base = head_base(0, batch, head, first, heads, length)
    sender_list, count, rows_per_sender = sending_rows(senders_ptr, batch, tokens, length, STRIDE, MASKED)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    KIND: tl.constexpr = q_ptr.dtype.element_ty
    k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, begin, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    bias = load_vector(message_sums_ptr + row_base, keys, tokens, float("-inf"), True)[:, None]
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    sums_grad = tl.zeros([KEYS], tl.float32)
    for start in tl.range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        grad = load_rows(g_base, start, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(belief_ptr + row_base, low_plane, rows, tokens, PRECISE, TAIL)
        delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, TAIL)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        refined = biased_weights(raw, bias, high[None, :], low[None, :], score_scale, PRECISE)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dropped = refined.to(KIND)
        dp = drop_scaled(dp, dropout, rows[None, :], keys[:, None], DROPS)
        dropped = drop(dropped, dropout, rows[None, :], keys[:, None], DROPS)
        dv = tl.dot(dropped, grad, dv, input_precision=PRECISION)
        d_logits = refined * (dp - delta[None, :])
        sums_grad += tl.sum(d_logits, 1)
        dk = tl.dot(d_logits.to(KIND), q, dk, input_precision=PRECISION)
    if DROPS:
        dv *= keep_scale
    store_rows(dv_ptr + d_base, begin, tokens, d_row, dv, KEYS, DIM, BLOCK_DIM)
    store_rows(dk_ptr + d_base, begin, tokens, d_row, dk * scale, KEYS, DIM, BLOCK_DIM)
    tl.store(sums_grad_ptr + row_base + keys, sums_grad * rows_per_sender, mask=keys < tokens)


@triton.jit
def sender_query_gradient(
    q_ptr, k_ptr, mask_ptr, cu_ptr, senders_ptr, strength_ptr, lse_ptr, sums_grad_ptr,
    dq_ptr, strength_grad_ptr, row_term_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, d_batch, d_head, d_row,
    heads, group, length, blocks, low_plane, scale, score_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """The part of dQ that goes through a block of sending rows' messages, and S."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    sender_list, count, rows_per_sender = sending_rows(senders_ptr, batch, tokens, length, STRIDE, MASKED)
    if block * ROWS >= count:
        return
    begin = block * ROWS
    rows = begin + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    KIND: tl.constexpr = q_ptr.dtype.element_ty
    q = load_senders(q_base, sender_list, begin, count, q_row, ROWS, DIM, BLOCK_DIM, True, STRIDE, MASKED)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, count, PRECISE, True)
    sums = tl.zeros([ROWS], tl.float32)
    rounded_sums = tl.zeros([ROWS], tl.float32)
    changes = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    prior_k = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for start in tl.range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        keys_real = real_tokens(mask_base, keys, tokens, MASKED)[None, :]
        sums_grad = load_vector(sums_grad_ptr + row_base, keys, tokens, 0.0, TAIL)[None, :]
        scores, a = prior_weights(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), high[:, None], low[:, None], keys_real,
            score_scale, TAIL or MASKED, PRECISE,
        )  # fmt: skip
        h = a * inverse_message(a, message, PRECISE) * sums_grad
        sums += tl.sum(h, 1)
        rounded = h.to(KIND)
        # The sum of rounded weights: for a row that sees one key both products then cancel exactly.
        rounded_sums += tl.sum(rounded.to(tl.float32), 1)
        changes = tl.dot(rounded, k, changes, input_precision=PRECISION)
        prior_k = tl.dot(a.to(KIND), k, prior_k, input_precision=PRECISION)
    dq = message[0] * scale * (rounded_sums[:, None] * prior_k - changes)
    places = sender_places(sender_list, rows, count, STRIDE, MASKED)
    inside = rows < count
    tl.store(row_term_ptr + row_base + rows, sums, mask=inside)
    tl.store(strength_grad_ptr + row_base + places, -sums, mask=inside)
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    d_base = states_base(dq_ptr, batch, head, first, d_batch, d_head, d_row)
    pointers = d_base + places.to(tl.int64)[:, None] * d_row + dims
    tl.store(pointers, dq.to(dq_ptr.dtype.element_ty), mask=inside[:, None] & (dims < DIM))


@triton.jit
def query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, cu_ptr, sends_ptr, seed_ptr, message_sums_ptr, belief_ptr, delta_ptr,
    dq_ptr, strength_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, low_plane, scale, score_scale, drop_threshold, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """dQ of a block of rows; of sending rows with the part that ``sender_query_gradient`` stored."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        return
    begin = block * ROWS
    rows = begin + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    row_base = head_base(0, batch, head, first, heads, length)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    KIND: tl.constexpr = q_ptr.dtype.element_ty
    q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
    high, low = load_lse(belief_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, True)
    dq = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for start in tl.range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
        bias = load_vector(message_sums_ptr + row_base, keys, tokens, float("-inf"), TAIL)[None, :]
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        refined = biased_weights(raw, bias, high[:, None], low[:, None], score_scale, PRECISE)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[:, None], keys[None, :], DROPS)
        d_logits = refined * (dp - delta[:, None])
        dq = tl.dot(d_logits.to(KIND), k, dq, input_precision=PRECISION)
    if MASKED and STRIDE > 1:
        sends = load_vector(sends_ptr + batch.to(tl.int64) * length, rows, tokens, 0, True) != 0
    else:
        sends = (rows % STRIDE == 0) & (rows < tokens)
    local, dims = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
    dq_base = states_base(dq_ptr, batch, head, first, d_batch, d_head, d_row)
    pointers = dq_base + tl.cast(d_row, tl.int64) * begin + (local * d_row + dims)
    dq = dq * scale + tl.load(pointers, mask=sends[:, None] & (dims < DIM), other=0.0).to(tl.float32)
    store_rows(dq_base, begin, tokens, d_row, dq, ROWS, DIM, BLOCK_DIM)
    tl.store(strength_grad_ptr + row_base + rows, tl.zeros([ROWS], tl.float32), mask=(rows < tokens) & ~sends)


@triton.jit
def sender_key_gradient(
    q_ptr, k_ptr, mask_ptr, cu_ptr, senders_ptr, strength_ptr, lse_ptr, sums_grad_ptr, row_term_ptr, dk_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, d_batch, d_head, d_row,
    heads, group, length, blocks, low_plane, scale, score_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys: the part that goes through messages is added to the stored one."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    sender_list, count, rows_per_sender = sending_rows(senders_ptr, batch, tokens, length, STRIDE, MASKED)
    begin = block * KEYS
    keys = begin + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    sums_grad = load_vector(sums_grad_ptr + row_base, keys, tokens, 0.0, True)[:, None]
    changes = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    for start in tl.range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = load_senders(q_base, sender_list, start, count, q_row, ROWS, DIM, BLOCK_DIM, TAIL, STRIDE, MASKED)
        high, low = load_lse(lse_ptr + row_base, low_plane, rows, count, PRECISE, TAIL)
        row_term = load_vector(row_term_ptr + row_base, rows, count, 0.0, TAIL)[None, :]
        scores, a = prior_weights(
            tl.dot(k, tl.trans(q), input_precision=PRECISION), high[None, :], low[None, :], rows, score_scale, False, PRECISE
        )  # fmt: skip
        d_scores = a * (row_term - inverse_message(a, message, PRECISE) * sums_grad)
        changes = tl.dot(d_scores.to(q.dtype), q, changes, input_precision=PRECISION)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    changes = tl.where(keys_real[:, None], changes * (message[0] * scale), 0.0)
    dk_base = states_base(dk_ptr, batch, head, first, d_batch, d_head, d_row)
    dk = changes + load_rows(dk_base, begin, tokens, d_row, KEYS, DIM, BLOCK_DIM, True).to(tl.float32)
    store_rows(dk_base, begin, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)

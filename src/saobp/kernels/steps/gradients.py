# mypy: ignore-errors
"""Several steps: dQ and dK, once the vectors of every step are known (see ``backward``)."""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.sums import raw_scores
from saobp.kernels.library.arithmetic import (
    drop_scaled,
    head_dropout,
    load_lse,
    load_rows,
    load_vector,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.library.indexing import locate, row_bases, states_base
from saobp.kernels.library.packed_bf16 import sums_by_thread
from saobp.kernels.steps.backward import d_belief_before, step_gradients, store_gamma_gradient
from saobp.kernels.steps.entries import (
    any_careful,
    block_count,
    first_block_of,
    head_messages,
    load_key_parts,
    load_steps,
    row_messages,
    run_steps,
)
from saobp.kernels.steps.two_steps import score_gradients


@triton.jit
def step_query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, norm_ptr, lowest_ptr, delta_ptr, sums_grad_ptr, dq_ptr,
    strength_grad_ptr, row_term_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row, d_batch, d_head, d_row,
    heads, group, length, blocks, blocks_each, lowest_blocks, lowest_plane, plane, scale, score_scale, lowest_sum, drop_threshold,
    keep_scale, damping, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    STEPS: tl.constexpr, COLUMNS: tl.constexpr, DAMPED: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    DROPS: tl.constexpr, LEARNS: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a block of rows, and E (``row_term``; dT sums to 0 in a row, so it is the sum of dT + a G_0).

    LEARNS: also the rows' parts of d gamma_0; with damping, of d gamma of every step.
    """
    pid = first_block_of(blocks, blocks_each, CAREFUL)
    first_block, batch, head, first, tokens = locate(pid, blocks, heads, length, cu_ptr, PACKED)
    if first_block * ROWS >= tokens:
        return
    if CHECKED:
        careful = any_careful(
            lowest_ptr, pid // blocks, lowest_blocks, lowest_plane, lowest_sum, STEPS, LOWEST_BLOCKS
        )
        if careful != (1 if CAREFUL else 0):
            return
    KIND: tl.constexpr = q_ptr.dtype.element_ty
    FAST: tl.constexpr = SHARED and PRECISE == 1 and not CAREFUL
    for turn in tl.range(0, block_count(first_block, blocks_each, tokens, ROWS, CAREFUL)):
        block = first_block + turn
        rows = block * ROWS + tl.arange(0, ROWS)
        q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
        k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
        v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
        g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
        row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
        q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
        grad = load_rows(g_base, block * ROWS, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
        high, low = load_lse(lse_ptr + row_base, plane, rows, tokens, PRECISE, True)
        anchors = load_steps(anchor_ptr + row_base, plane, rows, tokens, 0.0, STEPS, True, 1)
        norms = load_steps(norm_ptr + row_base, plane, rows, tokens, 1.0, STEPS, True, 1)
        deltas = load_steps(delta_ptr + row_base, plane, rows, tokens, 0.0, STEPS, True, 1)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)
        by_head = head_messages(strength_ptr, head, heads, sign, r0, r1, r2, l0, l1, l2, STEPS)
        messages = row_messages(by_head, rows_real[:, None], STEPS, MASKED)
        dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
        if FAST:
            slope = messages[1][0] * norms[0]
        columns = tl.arange(0, COLUMNS)[None, :]
        strength_grad = tl.zeros([ROWS, COLUMNS], tl.float32)
        first_grad = tl.zeros([ROWS, 8], tl.float32)
        row_terms = tl.zeros([ROWS, 8], tl.float32)
        dq = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        prior_k = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        for start in tl.range(0, tokens, KEYS):
            keys = start + tl.arange(0, KEYS)
            k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
            v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
            raw = raw_scores(q, k, real_tokens(mask_base, keys, tokens, MASKED), TAIL or MASKED, PRECISION)
            d_belief = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            scores = relative(raw, high[:, None], low[:, None], score_scale, PRECISE)
            a = tl.exp2(scores)
            prior_k = tl.dot(a.to(KIND), k, prior_k, input_precision=PRECISION)
            key_parts = load_key_parts(key_part_ptr + row_base, plane, keys, tokens, STEPS, TAIL, 0, RECEIVES)
            sums_grads = load_steps(sums_grad_ptr + row_base, plane, keys, tokens, 0.0, STEPS, TAIL, 0)
            d_belief = drop_scaled(d_belief, dropout, rows[:, None], keys[None, :], DROPS)
            if FAST:
                d_scores, a_message = score_gradients(
                    a, d_belief, messages, key_parts, norms, slope, deltas, sums_grads
                )
                if LEARNS:
                    first_grad += sums_by_thread(a_message)
                d_scores += messages[0][0] * a_message
            else:
                before, updated, inverses = run_steps(
                    scores, a, key_parts, anchors, norms, messages, damping, STEPS, RECEIVES, PRECISE, CAREFUL, DAMPED
                )  # fmt: skip
                d_scores = tl.zeros([ROWS, KEYS], tl.float32)
                for back in tl.static_range(STEPS):
                    d_logits, d_message = step_gradients(
                        d_belief, updated, inverses, deltas, sums_grads, damping, STEPS - 1 - back, RECEIVES, DAMPED
                    )  # fmt: skip
                    if LEARNS and DAMPED:
                        gamma_parts = tl.sum(before[STEPS - 1 - back] * d_message, 1)
                        strength_grad += tl.where(columns == STEPS - 1 - back, gamma_parts[:, None], 0.0)
                    d_scores += d_logits
                    d_belief = d_belief_before(
                        d_belief, d_message, messages[STEPS - 1 - back][0], damping, DAMPED
                    )
                if LEARNS and not DAMPED:
                    first_grad += sums_by_thread(a * d_message)
                d_scores += a * d_belief
            row_terms += sums_by_thread(d_scores)
            dq = tl.dot(d_scores.to(KIND), k, dq, input_precision=PRECISION)
        row_term = tl.sum(row_terms, 1)
        tl.store(row_term_ptr + row_base + rows, row_term, mask=rows < tokens)
        dq = (dq - row_term[:, None] * prior_k) * scale
        dq_base = states_base(dq_ptr, batch, head, first, d_batch, d_head, d_row)
        store_rows(dq_base, block * ROWS, tokens, d_row, dq, ROWS, DIM, BLOCK_DIM)
        if LEARNS and DAMPED:
            for step in tl.static_range(STEPS):
                gamma_parts = tl.sum(tl.where(columns == step, strength_grad, 0.0), 1)
                store_gamma_gradient(
                    strength_grad_ptr, batch, head, first, heads, length, rows, rows_real, tokens, gamma_parts, step, STEPS,
                )  # fmt: skip
        elif LEARNS:  # step_row_sums has stored those of later steps
            gamma_parts = tl.sum(first_grad, 1)
            store_gamma_gradient(
                strength_grad_ptr,
                batch,
                head,
                first,
                heads,
                length,
                rows,
                rows_real,
                tokens,
                gamma_parts,
                0,
                STEPS,
            )


@triton.jit
def step_key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, norm_ptr, lowest_ptr, delta_ptr, sums_grad_ptr, row_term_ptr, dk_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row, d_batch, d_head, d_row,
    heads, group, length, blocks, blocks_each, lowest_blocks, lowest_plane, plane, scale, score_scale, lowest_sum, drop_threshold,
    keep_scale, damping, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    STEPS: tl.constexpr, DAMPED: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys."""
    pid = first_block_of(blocks, blocks_each, CAREFUL)
    first_block, batch, head, first, tokens = locate(pid, blocks, heads, length, cu_ptr, PACKED)
    if first_block * KEYS >= tokens:
        return
    if CHECKED:
        careful = any_careful(
            lowest_ptr, pid // blocks, lowest_blocks, lowest_plane, lowest_sum, STEPS, LOWEST_BLOCKS
        )
        if careful != (1 if CAREFUL else 0):
            return
    for turn in tl.range(0, block_count(first_block, blocks_each, tokens, KEYS, CAREFUL)):
        block = first_block + turn
        keys = block * KEYS + tl.arange(0, KEYS)
        q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
        k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
        v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
        g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
        row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
        k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
        v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
        keys_real = real_tokens(mask_base, keys, tokens, MASKED)
        key_parts = load_key_parts(key_part_ptr + row_base, plane, keys, tokens, STEPS, True, 1, RECEIVES)
        sums_grads = load_steps(sums_grad_ptr + row_base, plane, keys, tokens, 0.0, STEPS, True, 1)
        by_head = head_messages(strength_ptr, head, heads, sign, r0, r1, r2, l0, l1, l2, STEPS)
        dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
        dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
        for start in tl.range(0, tokens, ROWS):
            rows = start + tl.arange(0, ROWS)
            q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
            grad = load_rows(g_base, start, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
            high, low = load_lse(lse_ptr + row_base, plane, rows, tokens, PRECISE, TAIL)
            row_term = load_vector(row_term_ptr + row_base, rows, tokens, 0.0, TAIL)
            anchors = load_steps(anchor_ptr + row_base, plane, rows, tokens, 0.0, STEPS, TAIL, 0)
            norms = load_steps(norm_ptr + row_base, plane, rows, tokens, 1.0, STEPS, TAIL, 0)
            deltas = load_steps(delta_ptr + row_base, plane, rows, tokens, 0.0, STEPS, TAIL, 0)
            messages = row_messages(
                by_head, real_tokens(mask_base, rows, tokens, MASKED)[None, :], STEPS, MASKED
            )
            raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            d_belief = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            scores = relative(raw, high[None, :], low[None, :], score_scale, PRECISE)
            a = tl.exp2(scores)
            d_belief = drop_scaled(d_belief, dropout, rows[None, :], keys[:, None], DROPS)
            _, updated, inverses = run_steps(
                scores, a, key_parts, anchors, norms, messages, damping, STEPS, RECEIVES, PRECISE, CAREFUL, DAMPED
            )  # fmt: skip
            d_scores = tl.zeros([KEYS, ROWS], tl.float32)
            for back in tl.static_range(STEPS):
                d_logits, d_message = step_gradients(
                    d_belief, updated, inverses, deltas, sums_grads, damping, STEPS - 1 - back, RECEIVES, DAMPED
                )  # fmt: skip
                d_scores += d_logits
                d_belief = d_belief_before(
                    d_belief, d_message, messages[STEPS - 1 - back][0], damping, DAMPED
                )
            d_scores += a * (d_belief - row_term[None, :])
            dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)
        dk = tl.where(keys_real[:, None], dk * scale, 0.0)
        dk_base = states_base(dk_ptr, batch, head, first, d_batch, d_head, d_row)
        store_rows(dk_base, block * KEYS, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)

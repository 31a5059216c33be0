# mypy: ignore-errors
"""Several steps: gradients. Beliefs are recomputed in every tile; sums over rows or keys are stored, one vector each.

With G_T = dO V^T, the gradient of the last beliefs, and back from t = T - 1 to 0 (notation as in ``entries``):

    D_t = sum over keys of (1 - damping) u_t G_t+1              (one per row)
    dT_t = u_t ((1 - damping) G_t+1 - D_t)                      gradient of the logits of step t
    dc_t = sum over rows of dT_t                                (one per key)
    H_t = (dT_t - dc_t) / m_t                                   d gamma_t = sum of b_t H_t
    G_t = damping G_t+1 + gamma_t H_t

and dS = sum_t dT_t + a (G_0 - E) with E = sum over keys of a G_0. Each step needs a sweep over rows for its D (``step_row_sums``)
and one over keys for its dc (``step_key_sums``, in the last step with dV); ``step_query_gradient`` and ``step_key_gradient`` then
have all vectors. The last D is not taken from rowsum(dO * O), whose O is rounded: dT must sum to 0 in each row, since dc adds
up the errors of all rows, and attraction (gamma < 0, unbounded) multiplies them.

Names in the code: ``d_belief`` is G, ``delta`` D, ``d_logits`` dT, ``sums_grad`` dc, ``d_message`` H, ``inverse`` 1 / m.

With two undamped steps (SHARED) the sweeps for D_1 and dc_1 also sum, from the same products, the terms of D_0 and dc_0 in dT_1. With
w = u_0 / m_1 (``weights``), whose products with u_1 G_2 (``spread``) and u_1 (``overlap``) are summed per row, and similarly per key,

    D_0 = gamma_1 (sum of w dT_1 - sum of w dc_1)        dc_0 = sum of gamma_1 w dT_1 - dc_1 sum of gamma_1 w - sum of u_0 D_0

where dT_1 = u_1 (G_2 - D_1). What is left for the sweeps of step 0 (LIGHT) are the last terms, which need no dO V^T.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.sums import raw_scores
from saobp.kernels.library.arithmetic import (
    _hardware_inverse,
    drop,
    drop_scaled,
    head_dropout,
    load_lse,
    load_rows,
    load_vector,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate, row_bases, states_base
from saobp.kernels.library.packed_bf16 import sums_by_thread
from saobp.kernels.steps.entries import (
    any_careful,
    block_count,
    first_block_of,
    head_messages,
    load_key_parts,
    load_steps,
    mix,
    row_messages,
    run_steps,
)
from saobp.kernels.steps.two_steps import message_products, paired_inverse


@triton.jit
def logit_gradient(d_belief, updated, delta, damping, DAMPED: tl.constexpr):
    """dT of a step from G after it."""
    if DAMPED:
        d_belief *= 1.0 - damping
    return updated * (d_belief - delta)


@triton.jit
def message_gradient(d_logits, inverse, sums_grad, RECEIVES: tl.constexpr):
    """H of a step."""
    if RECEIVES == 2:
        return -inverse * sums_grad
    elif RECEIVES == 1:
        return inverse * (d_logits - sums_grad)
    else:
        return inverse * d_logits


@triton.jit
def d_belief_before(d_belief, d_message, gamma, damping, DAMPED: tl.constexpr):
    """G before a step from G after it."""
    return damping * d_belief + gamma * d_message if DAMPED else gamma * d_message


@triton.jit
def step_gradients(
    d_belief, updated, inverses, deltas, sums_grads, damping,
    STEP: tl.constexpr, RECEIVES: tl.constexpr, DAMPED: tl.constexpr,
):  # fmt: skip
    """dT and H of t = STEP from G after it. ``updated`` is u, ``inverses`` 1 / m: tuples, with a tile or vector of each step."""
    d_logits = logit_gradient(d_belief, updated[STEP], deltas[STEP], damping, DAMPED)
    return d_logits, message_gradient(d_logits, inverses[STEP], sums_grads[STEP], RECEIVES)


@triton.jit
def d_belief_after(
    d_belief, updated, inverses, deltas, sums_grads, messages, damping,
    STEP: tl.constexpr, STEPS: tl.constexpr, RECEIVES: tl.constexpr, DAMPED: tl.constexpr,
):  # fmt: skip
    """G after t = STEP from G_T."""
    for back in tl.static_range(STEPS - 1 - STEP):
        _, d_message = step_gradients(
            d_belief, updated, inverses, deltas, sums_grads, damping, STEPS - 1 - back, RECEIVES, DAMPED
        )
        d_belief = d_belief_before(d_belief, d_message, messages[STEPS - 1 - back][0], damping, DAMPED)
    return d_belief


@triton.jit
def store_gamma_gradient(
    base, batch, head, first, heads, length, rows, rows_real, tokens, parts, STEP: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """The rows' parts of d gamma of a step, in ``[batch, steps * heads, length]``; padding has none."""
    base = head_base(base, batch, head + STEP * heads, first, heads * STEPS, length)
    tl.store(base + rows, tl.where(rows_real, parts, 0.0), mask=rows < tokens)


@triton.jit
def step_row_sums(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, norm_ptr, lowest_ptr, delta_ptr, sums_grad_ptr, strength_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    heads, group, length, blocks, blocks_each, lowest_blocks, lowest_plane, plane, score_scale, lowest_sum, drop_threshold, keep_scale,
    damping, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    STEP: tl.constexpr, STEPS: tl.constexpr, DAMPED: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    DROPS: tl.constexpr, LEARNS: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D_t of a block of rows for t = STEP; undamped also d gamma_t+1, since D_t = gamma_t+1 sum of b_t+1 H_t+1."""
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
    LAST: tl.constexpr = STEP == STEPS - 1
    LIGHT: tl.constexpr = SHARED and not LAST
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
        by_head = head_messages(strength_ptr, head, heads, sign, r0, r1, r2, l0, l1, l2, STEPS)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)
        messages = row_messages(by_head, rows_real[:, None], STEPS, MASKED)
        dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
        if FAST:
            slope = messages[1][0] * norms[0]
        total = tl.zeros([ROWS, 8], tl.float32)
        spread = tl.zeros([ROWS, 8], tl.float32)
        overlap = tl.zeros([ROWS, 8], tl.float32)
        for start in tl.range(0, tokens, KEYS):
            keys = start + tl.arange(0, KEYS)
            k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
            raw = raw_scores(q, k, real_tokens(mask_base, keys, tokens, MASKED), TAIL or MASKED, PRECISION)
            if not LIGHT:
                v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
                d_belief = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
                d_belief = drop_scaled(d_belief, dropout, rows[:, None], keys[None, :], DROPS)
            scores = relative(raw, high[:, None], low[:, None], score_scale, PRECISE)
            key_parts = load_key_parts(key_part_ptr + row_base, plane, keys, tokens, STEPS, TAIL, 0, RECEIVES)
            sums_grads = load_steps(sums_grad_ptr + row_base, plane, keys, tokens, 0.0, STEPS, TAIL, 0)
            a = tl.exp2(scores)
            if FAST:
                x, y, _ = message_products(a, messages, slope, key_parts[0])
            else:
                _, updated, inverses = run_steps(
                    scores, a, key_parts, anchors, norms, messages, damping, STEPS, RECEIVES, PRECISE, CAREFUL, DAMPED
                )  # fmt: skip
            if FAST and LIGHT:
                total += sums_by_thread(a * (key_parts[0] * sums_grads[1]) * paired_inverse(y))
            elif FAST:
                over_y = a * _hardware_inverse(y)
                refined = over_y * x * key_parts[1]
                weighted_grad = refined * d_belief
                total += sums_by_thread(weighted_grad)
                weights = over_y * (norms[0] * key_parts[0])
                spread += sums_by_thread(weights * weighted_grad)
                overlap += sums_by_thread(weights * refined)
            elif LIGHT:
                total += sums_by_thread(updated[0] * inverses[1] * sums_grads[1])
            elif DAMPED or LAST:
                d_belief = d_belief_after(
                    d_belief, updated, inverses, deltas, sums_grads, messages, damping, STEP, STEPS, RECEIVES, DAMPED,
                )  # fmt: skip
                weighted_grad = updated[STEP] * d_belief
                total += sums_by_thread(weighted_grad)
                if SHARED:
                    weights = updated[0] * inverses[1]
                    spread += sums_by_thread(weights * weighted_grad)
                    overlap += sums_by_thread(weights * updated[1])
            else:
                d_belief = d_belief_after(
                    d_belief, updated, inverses, deltas, sums_grads, messages, damping, STEP + 1, STEPS, RECEIVES, DAMPED
                )  # fmt: skip
                d_logits = logit_gradient(d_belief, updated[STEP + 1], deltas[STEP + 1], damping, DAMPED)
                d_message = message_gradient(d_logits, inverses[STEP + 1], sums_grads[STEP + 1], RECEIVES)
                total += sums_by_thread(updated[STEP] * d_message)
        delta = tl.sum(total, 1)
        delta_base = delta_ptr + row_base
        if FAST:
            delta *= tl.reshape(norms[STEP], [ROWS])
        if SHARED and LAST:
            left = tl.sum(spread, 1) - delta * tl.sum(overlap, 1)
            if FAST:
                left *= tl.reshape(norms[1], [ROWS])
            tl.store(delta_base + rows, left, mask=rows < tokens)
        if LIGHT:
            delta = load_vector(delta_base, rows, tokens, 0.0, True) - delta
        if DAMPED:
            delta *= 1.0 - damping
        elif not LAST:
            if LEARNS:
                store_gamma_gradient(
                    strength_grad_ptr, batch, head, first, heads, length, rows, rows_real, tokens, delta, STEP + 1, STEPS
                )  # fmt: skip
            gamma = by_head[STEP + 1][0]
            delta *= tl.where(rows_real, gamma, 0.0) if MASKED else gamma
        tl.store(delta_base + STEP * tl.cast(plane, tl.int64) + rows, delta, mask=rows < tokens)


@triton.jit
def step_key_sums(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, norm_ptr, lowest_ptr, delta_ptr, sums_grad_ptr, dv_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row, d_batch, d_head, d_row,
    heads, group, length, blocks, blocks_each, lowest_blocks, lowest_plane, plane, score_scale, lowest_sum, drop_threshold, keep_scale,
    damping, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    STEP: tl.constexpr, STEPS: tl.constexpr, DAMPED: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    DROPS: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dc_t of a block of keys for t = STEP; in the last step also dV."""
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
    VALUES: tl.constexpr = STEP == STEPS - 1
    LIGHT: tl.constexpr = SHARED and not VALUES
    FAST: tl.constexpr = SHARED and PRECISE == 1 and not CAREFUL
    KIND: tl.constexpr = q_ptr.dtype.element_ty
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
        total = tl.zeros([KEYS, 8], tl.float32)
        spread = tl.zeros([KEYS, 8], tl.float32)
        overlap = tl.zeros([KEYS, 8], tl.float32)
        dv = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
        for start in tl.range(0, tokens, ROWS):
            rows = start + tl.arange(0, ROWS)
            q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
            high, low = load_lse(lse_ptr + row_base, plane, rows, tokens, PRECISE, TAIL)
            anchors = load_steps(anchor_ptr + row_base, plane, rows, tokens, 0.0, STEPS, TAIL, 0)
            norms = load_steps(norm_ptr + row_base, plane, rows, tokens, 1.0, STEPS, TAIL, 0)
            deltas = load_steps(delta_ptr + row_base, plane, rows, tokens, 0.0, STEPS, TAIL, 0)
            messages = row_messages(
                by_head, real_tokens(mask_base, rows, tokens, MASKED)[None, :], STEPS, MASKED
            )
            raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            scores = relative(raw, high[None, :], low[None, :], score_scale, PRECISE)
            a = tl.exp2(scores)
            if FAST and VALUES:
                x, y, received = message_products(a, messages, messages[1][0] * norms[0], key_parts[0])
                over_y = a * _hardware_inverse(y)
                refined = over_y * x * key_parts[1] * norms[1]
            elif not FAST:
                before, updated, inverses = run_steps(
                    scores, a, key_parts, anchors, norms, messages, damping, STEPS, RECEIVES, PRECISE, CAREFUL, DAMPED
                )  # fmt: skip
            if FAST and LIGHT:
                total += sums_by_thread(a * (norms[0] * deltas[0]) * paired_inverse(1.0 - messages[0][0] * a))
            elif LIGHT:
                total += sums_by_thread(updated[0] * deltas[0])
            elif FAST:
                grad = load_rows(g_base, start, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
                d_belief = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
                d_belief = drop_scaled(d_belief, dropout, rows[None, :], keys[:, None], DROPS)
                d_logits = refined * (d_belief - deltas[1])
                total += sums_by_thread(d_logits)
                weights = over_y * received
                spread += sums_by_thread(weights * d_logits)
                overlap += sums_by_thread(weights)
            else:
                grad = load_rows(g_base, start, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
                d_belief = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
                d_belief = drop_scaled(d_belief, dropout, rows[None, :], keys[:, None], DROPS)
                d_belief = d_belief_after(
                    d_belief, updated, inverses, deltas, sums_grads, messages, damping, STEP, STEPS, RECEIVES, DAMPED,
                )  # fmt: skip
                d_logits = logit_gradient(d_belief, updated[STEP], deltas[STEP], damping, DAMPED)
                total += sums_by_thread(d_logits)
                if SHARED:
                    weights = messages[1][0] * updated[0] * inverses[1]
                    spread += sums_by_thread(weights * d_logits)
                    overlap += sums_by_thread(weights)
            if VALUES:
                if not FAST:
                    refined = mix(updated[STEP], before[STEP], damping, PRECISE, DAMPED)
                refined = drop(refined.to(KIND), dropout, rows[None, :], keys[:, None], DROPS)
                dv = tl.dot(refined, grad, dv, input_precision=PRECISION)
        sums_grad = tl.sum(total, 1)
        if FAST and LIGHT:
            sums_grad *= tl.reshape(key_parts[0], [KEYS])
        if SHARED and VALUES:
            left = tl.where(keys_real, tl.sum(spread, 1) - sums_grad * tl.sum(overlap, 1), 0.0)
            tl.store(sums_grad_ptr + row_base + keys, left, mask=keys < tokens)
        if LIGHT:
            sums_grad = load_vector(sums_grad_ptr + row_base, keys, tokens, 0.0, True) - sums_grad
        sums_grad = tl.where(keys_real, sums_grad, 0.0)
        step_base = row_base + STEP * tl.cast(plane, tl.int64) + keys
        tl.store(sums_grad_ptr + step_base, sums_grad, mask=keys < tokens)
        if VALUES:
            if DROPS:
                dv *= keep_scale
            dv = tl.where(keys_real[:, None], dv, 0.0)
            dv_base = states_base(dv_ptr, batch, head, first, d_batch, d_head, d_row)
            store_rows(dv_base, block * KEYS, tokens, d_row, dv, KEYS, DIM, BLOCK_DIM)

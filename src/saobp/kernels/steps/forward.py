# mypy: ignore-errors
"""Several steps: sweeps forward. Each step after the first adds ``step_rows`` and ``step_messages``, without values.

After ``row_sums`` and ``column_messages`` of one step, for t = 0 ... T - 1:

- ``step_rows`` (over rows): each row's sum of a weight_t / m_t, whose inverse is norm_t. In the last step (VALUES) also
  the output.
- ``step_messages`` (over keys): c_t+1 = sum over rows of log2(m_t+1), which needs norm_t.

Where a row's sum may underflow, each sweep is launched twice: once with keys' factors as logarithms (CAREFUL), for the heads
where that happened, and once for the others. A CAREFUL program has several blocks, since most often it finds nothing to do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.sums import raw_scores, store_message_sums
from saobp.kernels.library.arithmetic import (
    _hardware_inverse,
    drop,
    finite,
    head_dropout,
    load_lse,
    load_rows,
    load_vector,
    raise_maximum,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.library.indexing import locate, row_bases, states_base
from saobp.kernels.library.packed_bf16 import sums_by_thread
from saobp.kernels.steps.entries import (
    any_careful,
    belief_before,
    block_count,
    first_block_of,
    head_messages,
    load_key_parts,
    load_steps,
    log2_sent,
    own_inverse,
    row_messages,
    weigh,
)
from saobp.kernels.steps.two_steps import message_products, paired_inverse, paired_log2


@triton.jit
def step_rows(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, norm_ptr, lowest_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, blocks, blocks_each, lowest_blocks, lowest_plane, plane, score_scale, lowest_sum, drop_threshold, keep_scale,
    damping, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    STEP: tl.constexpr, VALUES: tl.constexpr, DAMPED: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr,
    LOWEST_BLOCKS: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """norm_t of a block of rows for t = STEP and its smallest sum; with VALUES also their output."""
    pid = first_block_of(blocks, blocks_each, CAREFUL)
    first_block, batch, head, first, tokens = locate(pid, blocks, heads, length, cu_ptr, PACKED)
    own_lowest = lowest_ptr + STEP * lowest_plane + pid
    if first_block * ROWS >= tokens:
        if not CAREFUL:
            tl.store(own_lowest, 1.0)
        return
    if CAREFUL:
        careful = any_careful(
            lowest_ptr, pid // blocks, lowest_blocks, lowest_plane, lowest_sum, STEP + 1, LOWEST_BLOCKS
        )
        if careful == 0:
            return
    elif CHECKED:
        earlier = any_careful(
            lowest_ptr, pid // blocks, lowest_blocks, lowest_plane, lowest_sum, STEP, LOWEST_BLOCKS
        )
        if earlier != 0:
            tl.store(own_lowest, 1.0)
            return
    KIND: tl.constexpr = v_ptr.dtype.element_ty
    FAST: tl.constexpr = STEP < 2 and RECEIVES == 1 and PRECISE == 1 and not (DAMPED or CAREFUL)
    for turn in tl.range(0, block_count(first_block, blocks_each, tokens, ROWS, CAREFUL)):
        block = first_block + turn
        rows = block * ROWS + tl.arange(0, ROWS)
        q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
        k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
        v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
        row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
        q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
        high, low = load_lse(lse_ptr + row_base, plane, rows, tokens, PRECISE, True)
        anchors = load_steps(anchor_ptr + row_base, plane, rows, tokens, 0.0, STEP, True, 1)
        norms = load_steps(norm_ptr + row_base, plane, rows, tokens, 1.0, STEP, True, 1)
        by_head = head_messages(strength_ptr, head, heads, sign, r0, r1, r2, l0, l1, l2, STEP + 1)
        messages = row_messages(
            by_head, real_tokens(mask_base, rows, tokens, MASKED)[:, None], STEP + 1, MASKED
        )
        if FAST and STEP == 1:
            slope = messages[1][0] * norms[0]
        dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        anchor = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, 8], tl.float32)
        rounded = tl.zeros([ROWS, 8], tl.float32)
        out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        out_before = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        for start in tl.range(0, tokens, KEYS):
            keys = start + tl.arange(0, KEYS)
            k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
            raw = raw_scores(q, k, real_tokens(mask_base, keys, tokens, MASKED), TAIL or MASKED, PRECISION)
            scores = relative(raw, high[:, None], low[:, None], score_scale, PRECISE)
            a = tl.exp2(scores)
            key_parts = load_key_parts(
                key_part_ptr + row_base, plane, keys, tokens, STEP + 1, TAIL, 0, RECEIVES
            )
            belief = belief_before(
                scores,
                a,
                key_parts,
                anchors,
                norms,
                messages,
                damping,
                STEP,
                RECEIVES,
                PRECISE,
                CAREFUL,
                DAMPED,
            )
            if CAREFUL:
                top, anchor, shrink = raise_maximum(top, scores + key_parts[STEP])
                total *= shrink[:, None]
                rounded *= shrink[:, None]
                out *= shrink[:, None]
            refined = weigh(scores, a, key_parts[STEP], anchor[:, None], RECEIVES, CAREFUL)
            if FAST and STEP == 0:
                refined *= paired_inverse(1.0 - messages[0][0] * a)
            elif FAST:
                x, y, _ = message_products(a, messages, slope, key_parts[0])
                refined *= x * _hardware_inverse(y)
            elif RECEIVES != 2:
                refined *= own_inverse(
                    scores, a, belief, key_parts, anchors, norms, messages, STEP, RECEIVES, PRECISE, CAREFUL, DAMPED,
                )  # fmt: skip
            total += sums_by_thread(refined)
            if VALUES:
                refined = refined.to(KIND)
                rounded += sums_by_thread(refined.to(tl.float32))
                v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
                refined = drop(refined, dropout, rows[:, None], keys[None, :], DROPS)
                out = tl.dot(refined, v, out, input_precision=PRECISION)
                if DAMPED:
                    belief = drop(belief.to(KIND), dropout, rows[:, None], keys[None, :], DROPS)
                    out_before = tl.dot(belief, v, out_before, input_precision=PRECISION)
        sums = tl.sum(total, 1)
        visible = (high < float("inf")) & (sums > 0)
        norm = tl.where(visible, 1.0 / tl.where(visible, sums, 1.0), 0.0)
        step_base = row_base + STEP * tl.cast(plane, tl.int64) + rows
        stored = tl.where(visible, sums, float("inf")) if PRECISE == 2 else norm
        tl.store(norm_ptr + step_base, stored, mask=rows < tokens)
        tl.store(anchor_ptr + step_base, anchor, mask=rows < tokens)
        if not CAREFUL:
            tl.store(own_lowest, tl.min(tl.where(high < float("inf"), sums, 1.0), 0))
        if VALUES:
            # By the sum of rounded weights: a row that sees one key returns exactly its value.
            parts = tl.sum(rounded, 1)
            out *= tl.where(visible, 1.0 / tl.where(visible, parts, 1.0), 0.0)[:, None]
            if DAMPED:
                out += damping * (out_before - out)
            if DROPS:
                out *= keep_scale
            out_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
            store_rows(out_base, block * ROWS, tokens, o_row, out, ROWS, DIM, BLOCK_DIM)


@triton.jit
def step_messages(
    q_ptr, k_ptr, mask_ptr, cu_ptr, strength_ptr,
    lse_ptr, key_part_ptr, anchor_ptr, norm_ptr, lowest_ptr, first_message_sums_ptr, message_sums_ptr, peak_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, group, length, blocks, blocks_each, lowest_blocks, lowest_plane, plane, score_scale, lowest_sum,
    damping, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    STEP: tl.constexpr, DAMPED: tl.constexpr, CHECKED: tl.constexpr, CAREFUL: tl.constexpr, LOWEST_BLOCKS: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c_t of a block of keys for t = STEP, up to a constant of the head, and its largest."""
    pid = first_block_of(blocks, blocks_each, CAREFUL)
    first_block, batch, head, first, tokens = locate(pid, blocks, heads, length, cu_ptr, PACKED)
    if first_block * KEYS >= tokens:
        tl.store(peak_ptr + pid, float("-inf"))
        return
    if CHECKED:
        careful = any_careful(
            lowest_ptr, pid // blocks, lowest_blocks, lowest_plane, lowest_sum, STEP, LOWEST_BLOCKS
        )
        if careful != (1 if CAREFUL else 0):
            return
    SECOND: tl.constexpr = STEP == 1 and RECEIVES == 1 and PRECISE == 1 and not DAMPED
    FAST: tl.constexpr = SECOND and not CAREFUL
    for turn in tl.range(0, block_count(first_block, blocks_each, tokens, KEYS, CAREFUL)):
        block = first_block + turn
        keys = block * KEYS + tl.arange(0, KEYS)
        q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
        k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
        row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
        k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
        key_parts = load_key_parts(key_part_ptr + row_base, plane, keys, tokens, STEP, True, 1, RECEIVES)
        by_head = head_messages(strength_ptr, head, heads, sign, r0, r1, r2, l0, l1, l2, STEP + 1)
        sums = tl.zeros([KEYS, 8], tl.float32)
        for start in tl.range(0, tokens, ROWS):
            rows = start + tl.arange(0, ROWS)
            q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
            high, low = load_lse(lse_ptr + row_base, plane, rows, tokens, PRECISE, TAIL)
            anchors = load_steps(anchor_ptr + row_base, plane, rows, tokens, 0.0, STEP, TAIL, 0)
            norms = load_steps(norm_ptr + row_base, plane, rows, tokens, 1.0, STEP, TAIL, 0)
            messages = row_messages(
                by_head, real_tokens(mask_base, rows, tokens, MASKED)[None, :], STEP + 1, MASKED
            )
            raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            scores = relative(raw, high[None, :], low[None, :], score_scale, PRECISE)
            if FAST:
                _, y, _ = message_products(tl.exp2(scores), messages, messages[1][0] * norms[0], key_parts[0])
                sums += sums_by_thread(paired_log2(y))
            else:
                sums += sums_by_thread(
                    log2_sent(
                        scores, tl.exp2(scores), key_parts, anchors, norms, messages, damping,
                        STEP, RECEIVES, PRECISE, CAREFUL, DAMPED,
                    )
                )  # fmt: skip
        if SECOND:  # log2_sent is log2(m_0 m_1)
            known = finite(load_vector(first_message_sums_ptr + row_base, keys, tokens, 0.0, True))
            sums -= tl.where(tl.arange(0, 8)[None, :] == 0, known[:, None], 0.0)
        peak = store_message_sums(message_sums_ptr + row_base, keys, tokens, mask_base, sums, 1.0, MASKED)
        tl.store(peak_ptr + pid + turn, peak)

"""Short sequences, not causal: the three sweeps of ``forward.py`` in one launch, all keys at hand.

One program does one head and leaves behind the same vectors for the backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.arithmetic import (
    head_message,
    head_seed,
    inverse_message,
    kept,
    load_lse,
    load_rows,
    locate,
    log2_message,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.forward import raw_scores


@triton.jit
def short_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, gamma_ptr, heard_ptr, weight_ptr,
    anchor_ptr, inverse_ptr, lowest_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, blocks, low_plane, score_scale, drop_threshold, keep_scale,
    r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    TAIL: tl.constexpr, HEARS: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of one head of one sequence of at most KEYS tokens; not TAIL: exactly KEYS real ones."""
    _, batch, head, first, tokens = locate(tl.program_id(0), 1, heads, length, cu_ptr, PACKED)
    keys = tl.arange(0, KEYS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = q_ptr + batch64 * q_batch + head * q_head + first64 * q_row
    k_base = k_ptr + batch64 * k_batch + (head // group) * k_head + first64 * k_row
    v_base = v_ptr + batch64 * v_batch + (head // group) * v_head + first64 * v_row
    out_base = out_ptr + batch64 * o_batch + head * o_head + first64 * o_row
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    real = real_tokens(mask_base, keys, tokens, MASKED)
    k = load_rows(k_base, 0, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
    message = head_message(gamma_ptr, head, r0, r1, r2, l0, l1, l2)

    for start in tl.range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        raw = raw_scores(q, k, real, TAIL or MASKED, PRECISION)
        high = tl.max(raw, 1)
        high = tl.where(high == float("-inf"), 0.0, high)
        if PRECISE != 2:
            high *= score_scale
        total = tl.sum(tl.exp2(relative(raw, high[:, None], 0.0, score_scale, PRECISE)), 1)
        if PRECISE == 2:
            tl.store(
                lse_ptr + low_plane + row_base + rows,
                tl.where(total > 0, tl.log2(total), 0.0),
                mask=rows < tokens,
            )
        else:
            high += tl.log2(total)
        tl.store(lse_ptr + row_base + rows, tl.where(total > 0, high, float("inf")), mask=rows < tokens)
    tl.debug_barrier()

    heard = tl.zeros([KEYS], tl.float32)
    if HEARS:
        for start in tl.range(0, tokens, ROWS):
            rows = start + tl.arange(0, ROWS)
            q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
            high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, TAIL)
            if MASKED:
                high = tl.where(real_tokens(mask_base, rows, tokens, MASKED), high, float("inf"))
            raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            a = tl.exp2(relative(raw, high[None, :], low[None, :], score_scale, PRECISE))
            heard += tl.sum(log2_message(a, message, PRECISE), 1)
        heard = tl.where(real, heard, float("-inf"))
        peak = tl.max(heard, 0)
        heard -= tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(heard_ptr + row_base + keys, heard, mask=keys < tokens)
        tl.store(weight_ptr + row_base + keys, tl.exp2(heard), mask=keys < tokens)
    weight = tl.exp2(heard)

    seed = tl.zeros([], tl.uint32)
    if DROPS:
        seed = head_seed(seed_ptr, row_base)
    v = load_rows(v_base, 0, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
    for start in tl.range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, TAIL)
        a = tl.exp2(
            relative(
                raw_scores(q, k, real, TAIL or MASKED, PRECISION),
                high[:, None],
                low[:, None],
                score_scale,
                PRECISE,
            )
        )
        refined = inverse_message(a, message, PRECISE)
        if MASKED:
            refined = tl.where(real_tokens(mask_base, rows, tokens, MASKED)[:, None], refined, 1.0)
        if HEARS:
            a *= weight[None, :]
        refined *= a
        total = tl.sum(refined, 1)
        if DROPS:
            keep = kept(seed, rows[:, None], keys[None, :], drop_threshold)
            refined = tl.where(keep, refined * keep_scale, 0.0)
        out = tl.dot(refined.to(v.dtype), v, input_precision=PRECISION)
        visible = (high < float("inf")) & (total > 0)
        out *= tl.where(visible, 1.0 / total, 0.0)[:, None]
        store_rows(out_base, start, tokens, o_row, out, ROWS, DIM, BLOCK_DIM)
        tl.store(inverse_ptr + row_base + rows, tl.where(visible, 1.0 / total, 0.0), mask=rows < tokens)
        tl.store(anchor_ptr + row_base + rows, tl.zeros([ROWS], tl.float32), mask=rows < tokens)
        lowest = tl.min(tl.where(high < float("inf"), total, 1.0), 0)
        tl.store(lowest_ptr + tl.program_id(0) * blocks + start // ROWS, lowest)
    for block in tl.range(tl.cdiv(tokens, ROWS), blocks):
        tl.store(lowest_ptr + tl.program_id(0) * blocks + block, 1.0)

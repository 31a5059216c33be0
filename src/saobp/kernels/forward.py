"""Long sequences, not causal: three sweeps over tiles in memory linear in length.

1. ``row_sums``: log-sum-exp of every row's scores.
2. ``column_messages``: what each key hears from all rows, gridded over keys, so without atomics;
   ``key_weights`` turns it into factors at most 1.
3. ``refined_output``: refined rows times values; ``careful_output`` repeats rows that underflowed.
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
    load_vector,
    locate,
    log2_message,
    real_tokens,
    relative,
    states_base,
    store_rows,
)
from saobp.kernels.pairs import boosted, multiply, pair_logarithm, pair_message, powers, short_log2


@triton.jit
def raw_scores(q, k, keys_real, TAIL: tl.constexpr, PRECISION: tl.constexpr):
    """Products of a tile ``[rows, keys]``; minus infinity where TAIL says keys may be missing."""
    raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if TAIL:
        raw = tl.where(keys_real[None, :], raw, float("-inf"))
    return raw


@triton.jit
def sums_by_thread(tile):
    """Parts ``[rows, 8]`` of a tile's row sums. A thread holds keys 8 apart, so threads need not ask each other."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 8]), 1)


@triton.jit
def row_sums(
    q_ptr, k_ptr, mask_ptr, cu_ptr, lse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, group, length, blocks, low_plane, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp of each row; plus infinity for a row that sees no key, so that its weights are 0."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        return
    rows = block * ROWS + tl.arange(0, ROWS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = states_base(q_ptr, batch64, head, first64, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch64, head // group, first64, k_batch, k_head, k_row)
    mask_base = mask_ptr + batch64 * length
    q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)

    # A score of the first tile serves as reference for the whole row: no running maximum is needed.
    real = real_tokens(mask_base, tl.arange(0, KEYS), tokens, MASKED)
    k = load_rows(k_base, 0, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    raw = raw_scores(q, k, real, True, PRECISION)
    reference = tl.max(raw, 1)
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    if PRECISE != 2:
        reference *= score_scale
    parts = sums_by_thread(powers(relative(raw, reference[:, None], 0.0, score_scale, PRECISE), PRECISE))
    for start in tl.range(KEYS, tokens, KEYS):
        real = real_tokens(mask_base, start + tl.arange(0, KEYS), tokens, MASKED)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        raw = raw_scores(q, k, real, TAIL or MASKED, PRECISION)
        parts += sums_by_thread(powers(relative(raw, reference[:, None], 0.0, score_scale, PRECISE), PRECISE))
    total = tl.sum(parts, 1)

    # A later score far above the reference overflows, or one far below it vanishes: keep a running maximum.
    if (tl.max(total) > 1e37) | (tl.min(total) < 1e-30):
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in tl.range(0, tokens, KEYS):
            real = real_tokens(mask_base, start + tl.arange(0, KEYS), tokens, MASKED)
            k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
            raw = raw_scores(q, k, real, True, PRECISION)
            raised = tl.maximum(top, tl.max(raw, 1))
            anchor = tl.where(raised == float("-inf"), 0.0, raised)
            added = tl.sum(tl.exp2((raw - anchor[:, None]) * score_scale), 1)
            total = total * tl.exp2((top - anchor) * score_scale) + added
            top = raised
        reference = tl.where(top == float("-inf"), 0.0, top)
        if PRECISE != 2:
            reference *= score_scale
    row_base = (batch64 * heads + head) * length + first64
    if PRECISE == 2:
        tl.store(
            lse_ptr + low_plane + row_base + rows,
            tl.where(total > 0, tl.log2(total), 0.0),
            mask=rows < tokens,
        )
    else:
        reference += tl.log2(total)
    tl.store(lse_ptr + row_base + rows, tl.where(total > 0, reference, float("inf")), mask=rows < tokens)


@triton.jit
def column_messages(
    q_ptr, k_ptr, mask_ptr, cu_ptr, lse_ptr, strength_ptr, heard_ptr, peak_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, group, length, blocks, low_plane, score_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 log messages that each key hears from all rows, and the largest of each block of keys."""
    pid = tl.program_id(0)
    block, batch, head, first, tokens = locate(pid, blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        tl.store(peak_ptr + pid, float("-inf"))
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = states_base(q_ptr, batch64, head, first64, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch64, head // group, first64, k_batch, k_head, k_row)
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    logarithm = pair_logarithm(message)
    ones = tl.full([ROWS, 16], 1.0, tl.float16)
    sums = tl.zeros([KEYS, 16], tl.float32)
    heard = tl.zeros([KEYS], tl.float32)
    for start in tl.range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, TAIL)
        if MASKED:
            high = tl.where(real_tokens(mask_base, rows, tokens, MASKED), high, float("inf"))
        a = tl.exp2(relative(raw, high[None, :], low[None, :], score_scale, PRECISE))
        if PRECISE == 0:
            sums = tl.dot(short_log2(a.to(tl.float16), logarithm), ones, sums)
        else:
            heard += tl.sum(log2_message(a, message, PRECISE), 1)
    if PRECISE == 0:
        heard = tl.max(sums, 1) * logarithm[0]
    real = real_tokens(mask_base, keys, tokens, MASKED)
    heard = tl.where(real, heard, float("-inf"))
    tl.store(heard_ptr + row_base + keys, heard, mask=keys < tokens)
    tl.store(peak_ptr + pid, tl.max(heard, 0))


@triton.jit
def key_weights(
    heard_ptr, peak_ptr, weight_ptr, cu_ptr, heads, length, blocks,
    KEYS: tl.constexpr, BLOCKS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """2^heard of each key relative to the head's largest; shifts heard by the same. Padding weighs 0."""
    pid = tl.program_id(0)
    block, batch, head, first, tokens = locate(pid, blocks, heads, length, cu_ptr, PACKED)
    places = tl.arange(0, BLOCKS)
    peaks = tl.load(peak_ptr + pid // blocks * blocks + places, mask=places < blocks, other=float("-inf"))
    peak = tl.max(peaks, 0)
    keys = block * KEYS + tl.arange(0, KEYS)
    base = (batch.to(tl.int64) * heads + head) * length + first
    heard = tl.load(heard_ptr + base + keys, mask=keys < tokens, other=float("-inf"))
    heard -= tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(heard_ptr + base + keys, heard, mask=keys < tokens)
    tl.store(weight_ptr + base + keys, tl.exp2(heard), mask=keys < tokens)


@triton.jit
def add_row_sums(totals, tile, ones, PRECISE: tl.constexpr):
    """Adds the sums of a tile's rows to every column of ``totals`` ``[rows, 16]``: half types on the tensor cores.

    Sums are of the rounded weights that meet the values. So a row that sees one key gives exactly its value.
    """
    if PRECISE == 2:
        return totals + tl.sum(tile, 1)[:, None]
    return tl.dot(tile, ones, totals)


@triton.jit
def refined_output(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, heard_ptr, weight_ptr,
    anchor_ptr, inverse_ptr, lowest_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, blocks, low_plane, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    HEARS: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of a block of rows, the inverse of each row's normaliser, and the block's smallest normaliser."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        tl.store(lowest_ptr + tl.program_id(0), 1.0)
        return
    rows = block * ROWS + tl.arange(0, ROWS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = states_base(q_ptr, batch64, head, first64, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch64, head // group, first64, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch64, head // group, first64, v_batch, v_head, v_row)
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)
    seed = tl.zeros([], tl.uint32)
    if DROPS:
        seed = head_seed(seed_ptr, row_base)
    KIND: tl.constexpr = v_ptr.dtype.element_ty
    pair = pair_message(message, KIND)
    ones = tl.full([KEYS, 16], 1.0, KIND)
    totals = tl.zeros([ROWS, 16], tl.float32)
    out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for start in tl.range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        raw = raw_scores(q, k, real_tokens(mask_base, keys, tokens, MASKED), TAIL or MASKED, PRECISION)
        # Refined weights as a product, a * weight / message: one exponential per entry.
        a = tl.exp2(relative(raw, high[:, None], low[:, None], score_scale, PRECISE))
        if PRECISE == 0:
            refined = boosted(a.to(KIND), pair)
            if MASKED:
                refined = tl.where(rows_real[:, None], refined, a.to(KIND))
            if HEARS:
                weight = load_vector(weight_ptr + row_base, keys, tokens, 0.0, TAIL)
                refined = multiply(refined, weight[None, :])
        else:
            inverse = inverse_message(a, message, PRECISE)
            if MASKED:
                inverse = tl.where(rows_real[:, None], inverse, 1.0)
            if HEARS:
                a *= load_vector(weight_ptr + row_base, keys, tokens, 0.0, TAIL)[None, :]
            refined = (a * inverse).to(KIND)
        totals = add_row_sums(totals, refined, ones, PRECISE)
        if DROPS:
            refined = tl.where(kept(seed, rows[:, None], keys[None, :], drop_threshold), refined, 0.0)
        v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
        out = tl.dot(refined, v, out, input_precision=PRECISION)
    total = tl.max(totals, 1)
    visible = (high < float("inf")) & (total > 0)
    out *= tl.where(visible, keep_scale / total, 0.0)[:, None]
    out_base = states_base(out_ptr, batch64, head, first64, o_batch, o_head, o_row)
    store_rows(out_base, block * ROWS, tokens, o_row, out, ROWS, DIM, BLOCK_DIM)
    tl.store(inverse_ptr + row_base + rows, tl.where(visible, 1.0 / total, 0.0), mask=rows < tokens)
    tl.store(anchor_ptr + row_base + rows, tl.zeros([ROWS], tl.float32), mask=rows < tokens)
    tl.store(lowest_ptr + tl.program_id(0), tl.min(tl.where(high < float("inf"), total, 1.0), 0))


@triton.jit
def careful_output(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, heard_ptr, weight_ptr,
    anchor_ptr, inverse_ptr, lowest_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, blocks, low_plane, score_scale, lowest_sum, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Does a block of rows again with logarithms if the product of weights came near underflow there.

    That happens to a row whose whole weight sits on keys that the other rows shun. Nearly always there is
    nothing to do, and registers are not shared with the fast way: hence a kernel of its own.
    """
    if tl.load(lowest_ptr + tl.program_id(0)) >= lowest_sum:
        return
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    rows = block * ROWS + tl.arange(0, ROWS)
    batch64, first64 = batch.to(tl.int64), first.to(tl.int64)
    q_base = states_base(q_ptr, batch64, head, first64, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch64, head // group, first64, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch64, head // group, first64, v_batch, v_head, v_row)
    row_base = (batch64 * heads + head) * length + first64
    mask_base = mask_ptr + batch64 * length
    q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)
    seed = tl.zeros([], tl.uint32)
    if DROPS:
        seed = head_seed(seed_ptr, row_base)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    anchor = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for start in tl.range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        raw = raw_scores(q, k, real_tokens(mask_base, keys, tokens, MASKED), True, PRECISION)
        scores = relative(raw, high[:, None], low[:, None], score_scale, PRECISE)
        inverse = inverse_message(tl.exp2(scores), message, PRECISE)
        if MASKED:
            inverse = tl.where(rows_real[:, None], inverse, 1.0)
        scores += load_vector(heard_ptr + row_base, keys, tokens, float("-inf"), TAIL)[None, :]
        raised = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(raised == float("-inf"), 0.0, raised)
        shrink = tl.exp2(top - anchor)
        refined = (tl.exp2(scores - anchor[:, None]) * inverse).to(v_ptr.dtype.element_ty)
        total = total * shrink + tl.sum(refined.to(tl.float32), 1)
        if DROPS:
            refined = tl.where(kept(seed, rows[:, None], keys[None, :], drop_threshold), refined, 0.0)
        v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
        out = tl.dot(refined, v, out * shrink[:, None], input_precision=PRECISION)
        top = raised
    visible = (high < float("inf")) & (total > 0)
    out *= tl.where(visible, keep_scale / total, 0.0)[:, None]
    out_base = states_base(out_ptr, batch64, head, first64, o_batch, o_head, o_row)
    store_rows(out_base, block * ROWS, tokens, o_row, out, ROWS, DIM, BLOCK_DIM)
    tl.store(inverse_ptr + row_base + rows, tl.where(visible, 1.0 / total, 0.0), mask=rows < tokens)
    tl.store(anchor_ptr + row_base + rows, anchor, mask=rows < tokens)


@triton.jit
def is_careful(lowest_ptr, programs, blocks, lowest_sum, BLOCKS: tl.constexpr):
    """1 if some refined row of the head has a normaliser so small that a product of weights may underflow.

    ``programs`` is how many work on a head, ``blocks`` how many blocks of its rows noted a normaliser.
    """
    places = tl.arange(0, BLOCKS)
    lowest_base = lowest_ptr + tl.program_id(0) // programs * blocks
    lowest = tl.min(tl.load(lowest_base + places, mask=places < blocks, other=1.0), 0)
    return tl.where(lowest < lowest_sum, 1, 0)

# mypy: ignore-errors
"""Long bidirectional sequences: the third sweep, after the two of ``sums``.

``refined_output``: refined rows times values; ``careful_output`` recomputes rows that underflowed. Tiles of 128 rows
are processed in two halves, as in ``sums``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.sums import raw_scores
from saobp.kernels.library.arithmetic import (
    divided_by_message,
    drop,
    fetch_tile,
    head_dropout,
    head_message,
    inverse_message,
    load_lse,
    load_rows,
    load_vector,
    over_message,
    raise_maximum,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.library.indexing import locate, row_bases, states_base, states_of
from saobp.kernels.library.packed_bf16 import boosted, multiply, pair_message


@triton.jit
def add_row_sums(totals, tile, ones, PRECISE: tl.constexpr):
    """Adds a tile's row sums to every column of ``totals`` ``[rows, 16]``; half types by a product with ``ones`` ``[keys, 16]``.

    These are the rounded weights that multiply the values, so a row that sees one key returns exactly its value.
    """
    if PRECISE == 2:
        return totals + tl.sum(tile, 1)[:, None]
    return tl.dot(tile, ones, totals)


@triton.jit
def sender_ratio(a, rows_real, message, PRECISE: tl.constexpr, MASKED: tl.constexpr):
    """u = a / (1 - gamma a) of a tile; a for padding rows, which send no message."""
    if MASKED and PRECISE == 1:
        return over_message(a, tl.where(rows_real, message[0], 0.0))
    u = divided_by_message(a, message, PRECISE)
    if MASKED:
        u = tl.where(rows_real, u, a)
    return u


@triton.jit
def refined_tile(
    raw, high, low, rows_real, weight, score_scale, message, pair,
    KIND: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Refined weights ``[rows, keys]``, not normalised, as products a * weight / message: one exponential per entry."""
    a = tl.exp2(relative(raw, high[:, None], low[:, None], score_scale, PRECISE))
    if RECEIVES == 2:
        refined = multiply(a.to(KIND), weight[None, :]) if PRECISE == 0 else (a * weight[None, :]).to(KIND)
    elif PRECISE == 0:
        refined = boosted(a.to(KIND), pair)
        if MASKED:
            refined = tl.where(rows_real[:, None], refined, a.to(KIND))
        if RECEIVES:
            refined = multiply(refined, weight[None, :])
    else:
        refined = sender_ratio(a, rows_real[:, None], message, PRECISE, MASKED)
        if RECEIVES:
            refined *= weight[None, :]
        refined = refined.to(KIND)
    return refined


@triton.jit
def store_output(
    out_base, anchor_base, inverse_base, begin, tokens, o_row, out, totals, high, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Stores the output of a tile's rows and the inverses of their normalisers; anchors are 0. Returns the smallest normaliser."""
    rows = begin + tl.arange(0, out.shape[0])
    total = tl.max(totals, 1)
    visible = (high < float("inf")) & (total > 0)
    out *= tl.where(visible, keep_scale / total, 0.0)[:, None]
    store_rows(out_base, begin, tokens, o_row, out, out.shape[0], DIM, BLOCK_DIM)
    tl.store(inverse_base + rows, tl.where(visible, 1.0 / total, 0.0), mask=rows < tokens)
    tl.store(anchor_base + rows, tl.zeros([out.shape[0]], tl.float32), mask=rows < tokens)
    return tl.min(tl.where(high < float("inf"), total, 1.0), 0)


@triton.jit
def refined_output(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, message_sums_ptr, weight_ptr,
    anchor_ptr, inverse_ptr, lowest_ptr, k_map, v_map,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, blocks, low_plane, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Output of a block of rows, the inverse of each row's normaliser, and the block's smallest normaliser."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        tl.store(lowest_ptr + tl.program_id(0), 1.0)
        return
    SPLIT: tl.constexpr = ROWS == 128
    PART: tl.constexpr = 64 if SPLIT else ROWS
    begin = block * ROWS
    rows = begin + tl.arange(0, PART)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    key_states = states_of(k_map, k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    value_states = states_of(v_map, v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    out_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    KIND: tl.constexpr = v_ptr.dtype.element_ty
    pair = pair_message(message, KIND)
    ones = tl.full([KEYS, 16], 1.0, KIND)
    q = load_rows(q_base, begin, tokens, q_row, PART, DIM, BLOCK_DIM, True)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)
    totals = tl.zeros([PART, 16], tl.float32)
    out = tl.zeros([PART, BLOCK_DIM], tl.float32)
    if SPLIT:
        rows_2 = rows + PART
        q_2 = load_rows(q_base, begin + PART, tokens, q_row, PART, DIM, BLOCK_DIM, True)
        high_2, low_2 = load_lse(lse_ptr + row_base, low_plane, rows_2, tokens, PRECISE, True)
        rows_real_2 = real_tokens(mask_base, rows_2, tokens, MASKED)
        totals_2 = tl.zeros([PART, 16], tl.float32)
        out_2 = tl.zeros([PART, BLOCK_DIM], tl.float32)
    for start in tl.range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = fetch_tile(key_states, start, tokens, KEYS, DIM, BLOCK_DIM, TAIL, MAPPED)
        v = fetch_tile(value_states, start, tokens, KEYS, DIM, BLOCK_DIM, TAIL, MAPPED)
        real = real_tokens(mask_base, keys, tokens, MASKED)
        weight = real
        if RECEIVES:
            weight = load_vector(weight_ptr + row_base, keys, tokens, 0.0, TAIL)
        raw = raw_scores(q, k, real, TAIL or MASKED, PRECISION)
        if SPLIT and not MAPPED:
            raw_2 = raw_scores(q_2, k, real, TAIL or MASKED, PRECISION)
        refined = refined_tile(
            raw, high, low, rows_real, weight, score_scale, message, pair, KIND, RECEIVES, PRECISE, MASKED
        )
        totals = add_row_sums(totals, refined, ones, PRECISE)
        refined = drop(refined, dropout, rows[:, None], keys[None, :], DROPS)
        out = tl.dot(refined, v, out, input_precision=PRECISION)
        if SPLIT:
            if MAPPED:  # with few registers, one half after the other
                raw_2 = raw_scores(q_2, k, real, TAIL or MASKED, PRECISION)
            refined_2 = refined_tile(
                raw_2, high_2, low_2, rows_real_2, weight, score_scale, message, pair, KIND, RECEIVES, PRECISE, MASKED
            )  # fmt: skip
            totals_2 = add_row_sums(totals_2, refined_2, ones, PRECISE)
            refined_2 = drop(refined_2, dropout, rows_2[:, None], keys[None, :], DROPS)
            out_2 = tl.dot(refined_2, v, out_2, input_precision=PRECISION)
    lowest = store_output(
        out_base, anchor_ptr + row_base, inverse_ptr + row_base, begin, tokens, o_row, out, totals, high, keep_scale,
        DIM, BLOCK_DIM,
    )  # fmt: skip
    if SPLIT:
        lowest_2 = store_output(
            out_base, anchor_ptr + row_base, inverse_ptr + row_base, begin + PART, tokens, o_row, out_2, totals_2, high_2,
            keep_scale, DIM, BLOCK_DIM,
        )  # fmt: skip
        lowest = tl.minimum(lowest, lowest_2)
    tl.store(lowest_ptr + tl.program_id(0), lowest)


@triton.jit
def careful_block(
    program, q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, message_sums_ptr,
    anchor_ptr, inverse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, blocks, low_plane, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Recomputes the block of rows number ``program`` with weights as logarithms, by online softmax; stores output, inverses, anchors."""
    block, batch, head, first, tokens = locate(program, blocks, heads, length, cu_ptr, PACKED)
    rows = block * ROWS + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    anchor = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for start in tl.range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        raw = raw_scores(q, k, real_tokens(mask_base, keys, tokens, MASKED), True, PRECISION)
        scores = relative(raw, high[:, None], low[:, None], score_scale, PRECISE)
        if RECEIVES == 2:
            inverse = tl.full(scores.shape, 1.0, tl.float32)
        else:
            inverse = inverse_message(tl.exp2(scores), message, PRECISE)
            if MASKED:
                inverse = tl.where(rows_real[:, None], inverse, 1.0)
        scores += load_vector(message_sums_ptr + row_base, keys, tokens, float("-inf"), TAIL)[None, :]
        top, anchor, shrink = raise_maximum(top, scores)
        refined = (tl.exp2(scores - anchor[:, None]) * inverse).to(v_ptr.dtype.element_ty)
        total = total * shrink + tl.sum(refined.to(tl.float32), 1)
        refined = drop(refined, dropout, rows[:, None], keys[None, :], DROPS)
        v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
        out = tl.dot(refined, v, out * shrink[:, None], input_precision=PRECISION)
    visible = (high < float("inf")) & (total > 0)
    out *= tl.where(visible, keep_scale / total, 0.0)[:, None]
    out_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    store_rows(out_base, block * ROWS, tokens, o_row, out, ROWS, DIM, BLOCK_DIM)
    tl.store(inverse_ptr + row_base + rows, tl.where(visible, 1.0 / total, 0.0), mask=rows < tokens)
    tl.store(anchor_ptr + row_base + rows, anchor, mask=rows < tokens)


@triton.jit
def careful_output(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, message_sums_ptr, weight_ptr,
    anchor_ptr, inverse_ptr, lowest_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, blocks, all_blocks, low_plane, score_scale, lowest_sum, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCKS_EACH: tl.constexpr,
):  # fmt: skip
    """Recomputes a block of rows in the log domain if its product of weights came near underflow.

    That happens to a row whose whole weight is on keys that other rows' messages suppress. It is rare, and a separate
    kernel does not cost the fast path registers. A program looks at BLOCKS_EACH blocks, of ``all_blocks`` of the call.
    """
    begin = tl.program_id(0) * BLOCKS_EACH
    places = begin + tl.arange(0, BLOCKS_EACH)
    if tl.min(tl.load(lowest_ptr + places, mask=places < all_blocks, other=1.0), 0) >= lowest_sum:
        return
    for program in tl.range(begin, tl.minimum(begin + BLOCKS_EACH, all_blocks)):
        if tl.load(lowest_ptr + program) < lowest_sum:
            careful_block(
                program, q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, message_sums_ptr,
                anchor_ptr, inverse_ptr,
                q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
                heads, group, length, blocks, low_plane, score_scale, drop_threshold, keep_scale,
                sign, r0, r1, r2, l0, l1, l2,
                DIM, BLOCK_DIM, ROWS, KEYS, TAIL, RECEIVES, PRECISE, MASKED, PACKED, DROPS, PRECISION,
            )  # fmt: skip


@triton.jit
def is_careful(lowest_ptr, line, blocks, lowest_sum, BLOCKS: tl.constexpr):
    """1 if a refined row of this head has a normaliser so small that a product of weights may underflow.

    ``line`` is sequence * heads + head; ``blocks`` is how many blocks of its rows recorded a normaliser.
    """
    places = tl.arange(0, BLOCKS)
    lowest = tl.min(tl.load(lowest_ptr + line * blocks + places, mask=places < blocks, other=1.0), 0)
    return tl.where(lowest < lowest_sum, 1, 0)

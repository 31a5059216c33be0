# mypy: ignore-errors
"""Strict causal attention of known, weak repulsion (0 < gamma <= 0.21): sweeps 2 and 3 of ``forward.py`` in bfloat16.

Tiles are ``[keys, rows]``, so that messages, the first operand of products, stay in registers. No message raises a
belief, so beliefs relative to the row's log-sum-exp need no maximum; a block of rows whose normaliser comes near
underflow, or whose head has a negative strength, is recorded in ``lowest`` and recomputed by ``causal_output``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.causal.block_indexing import key_walk, row_walk, slot_place
from saobp.kernels.causal.forward import scores_by_key, upper_triangle
from saobp.kernels.library.arithmetic import (
    drop,
    fetch_tile,
    head_dropout,
    head_message,
    load_rows,
    load_vector,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate_sorted, mask_base_of, states_base, states_of
from saobp.kernels.library.packed_bf16 import half_log2, pair_logarithm, rounded, widened


@triton.jit
def weak_prior(raw, lse, rows_real, score_scale, MASKED: tl.constexpr):
    """Scores minus log-sum-exp of a tile ``[keys, rows]``, prior weights, and these with 0 in padding rows, which send no message."""
    scores = raw * score_scale - lse[None, :]
    a = tl.exp2(scores)
    if MASKED:
        return scores, a, tl.where(rows_real[None, :], a, 0.0)
    else:
        return scores, a, a


@triton.jit
def weak_log_messages(a, logarithm):
    """log2(1 - gamma a) / l0 in float16, where l0 is the slope at a = 0."""
    return half_log2(rounded(a, tl.float16), logarithm)


@triton.jit
def weak_triangle(logarithm, ROWS: tl.constexpr, RECEIVES: tl.constexpr, RECEIVED: tl.constexpr):
    """``[sender, receiver]``: l0, the unit of ``weak_log_messages``, where a message is received, or if not RECEIVED where it is not.

    Entries are 0 elsewhere.
    """
    received = upper_triangle(ROWS, tl.float32, RECEIVES == 2)
    return ((received if RECEIVED else 1.0 - received) * logarithm[0]).to(tl.float16)


@triton.jit
def _first(one, other):
    return one


@triton.jit
def any_column(tile):
    """One column ``[keys]`` of a tile whose columns are equal, without communication between threads."""
    return tl.reduce(tile, 1, _first)


@triton.jit
def sums_over_rows(tile, ones):
    """Sums over the rows of a tile ``[keys, rows]`` of a half type, by a product with ones ``[rows, 16]``."""
    return any_column(tl.dot(tile, ones, input_precision="ieee"))


@triton.jit
def add_rows(totals, tile):
    """Adds a tile ``[keys, rows]`` of a half type to partial sums ``[keys / 16, 8, rows]`` of float32.

    A thread adds its own keys, 8 apart; sums over threads are left for the end.
    """
    KEYS: tl.constexpr = tile.shape[0]
    ROWS: tl.constexpr = tile.shape[1]
    return totals + tl.sum(tl.reshape(widened(tile), [KEYS // 16, 2, 8, ROWS]), 1)


@triton.jit
def halves(tile):
    """The earlier and the later rows of a tile ``[keys, rows]``, without moving data."""
    KEYS: tl.constexpr = tile.shape[0]
    HALF: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, [KEYS, 2, HALF]), (0, 2, 1)))


@triton.jit
def joined(earlier, later):
    """Inverse of ``halves``."""
    KEYS: tl.constexpr = earlier.shape[0]
    ROWS: tl.constexpr = 2 * earlier.shape[1]
    return tl.reshape(tl.permute(tl.join(earlier, later), (0, 2, 1)), [KEYS, ROWS])


@triton.jit
def store_sums(base, keys, tokens, keys_real, sums, MASKED: tl.constexpr):
    """Stores one number per key, 0 for padding."""
    if MASKED:
        sums = tl.where(keys_real, sums, 0.0)
    tl.store(base + keys, sums, mask=keys < tokens)


@triton.jit
def load_pairs(base, begin, tokens, other, SIZE: tl.constexpr, EDGE: tl.constexpr):
    """Two vectors ``[SIZE]`` from position ``begin`` on of ``[length, 2]``; beyond the sequence ``other`` and 0.

    Interleaved, there are as many numbers as threads, so each is loaded once; a vector of 64 would be loaded by several threads.
    """
    local = tl.arange(0, SIZE)
    pointers = base + 2 * begin + 2 * local[:, None] + tl.arange(0, 2)[None, :]
    if EDGE:
        inside = local < tokens - begin
        one, two = tl.split(tl.load(pointers, mask=inside[:, None], other=0.0))
        return tl.where(inside, one, other), two
    else:
        return tl.split(tl.load(pointers))


@triton.jit
def store_pairs(base, places, tokens, one, two):
    """Stores two numbers per position, as ``load_pairs`` loads them."""
    pointers = base + 2 * places[:, None] + tl.arange(0, 2)[None, :]
    tl.store(pointers, tl.join(one, two), mask=(places < tokens)[:, None])


@triton.jit
def store_key_pairs(base, keys, tokens, keys_real, one, two, MASKED: tl.constexpr):
    """``store_pairs`` of keys, 0 for padding."""
    if MASKED:
        one, two = tl.where(keys_real, one, 0.0), tl.where(keys_real, two, 0.0)
    store_pairs(base, keys, tokens, one, two)


@triton.jit
def _add_weak(
    message_sums, k, keys, keys_real, logarithm, queries, mask_base, lse_base, past_base, length, span_start,
    start, stop, tokens, score_scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Rows from ``start`` to ``stop``: as ``forward._add_earlier``, with messages summed by a product with ones."""
    ones = tl.full([ROWS, 16], 1.0, tl.float16)
    place = slot_place((start - span_start) // ROWS, span_start, length, ROWS, PACKED)
    for step in tl.range(0, tl.cdiv(stop - start, ROWS)):
        begin = tl.multiple_of(start + step * ROWS, ROWS)
        local = tl.arange(0, ROWS)
        rows = begin + local
        seen = min(tokens, begin + ROWS) if EDGE else tokens
        store_sums(past_base + place, keys, seen, keys_real, message_sums, MASKED)
        place += length if PACKED else begin + ROWS
        q = fetch_tile(queries, begin, tokens, ROWS, DIM, BLOCK_DIM, EDGE, MAPPED)
        lse = load_vector(lse_base + begin, local, tokens - begin, float("inf"), EDGE)
        if MASKED:
            lse = tl.where(real_tokens(mask_base, rows, tokens, MASKED), lse, float("inf"))
        raw = scores_by_key(k, q, keys, rows, keys_real, EDGE, False, PRECISION)
        _, a, _ = weak_prior(raw, lse, keys_real, score_scale, False)
        message_sums += sums_over_rows(weak_log_messages(a, logarithm), ones) * logarithm[0]
    return message_sums


@triton.jit(do_not_specialize=["section"])
def weak_messages(
    q_ptr, k_ptr, mask_ptr, cu_ptr, lse_ptr, strength_ptr, past_ptr, message_sums_ptr, q_map,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, group, length, blocks, section, sums_plane, span_start, span_stop, score_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """As ``forward.earlier_messages``."""
    block, batch, head, first, tokens, _ = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    queries = states_of(q_map, q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    row_base = head_base(0, batch, head, first, heads, length)
    past_base = head_base(past_ptr, batch, head, first, heads, sums_plane)
    mask_base = mask_base_of(mask_ptr, batch, length)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    logarithm = pair_logarithm(head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2))
    # Rows of earlier spans have seen only keys before the span.
    message_sums = load_vector(message_sums_ptr + row_base, keys, min(span_start, tokens), 0.0, True)
    walk = row_walk(block * KEYS, span_start, span_stop, tokens, ROWS, KEYS)
    for leg in tl.static_range(3):
        message_sums = _add_weak(
            message_sums, k, keys, keys_real, logarithm, queries, mask_base, lse_ptr + row_base, past_base, length,
            span_start, walk[leg], walk[leg + 1], tokens, score_scale,
            ROWS, DIM, BLOCK_DIM, leg != 1, MASKED, PACKED, PRECISION, MAPPED,
        )  # fmt: skip
    store_sums(message_sums_ptr + row_base, keys, tokens, keys_real, message_sums, MASKED)


@triton.jit
def _add_output(
    totals, out, q, lse, rows, rows_real, key_states, value_states, mask_base, past_base,
    start, stop, tokens, score_scale, logarithm, triangle, dropout,
    KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGE: tl.constexpr,
    MASKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Keys from ``start`` to ``stop``: adds refined weights to ``totals``, as ``add_rows``, and their output ``[BLOCK_DIM, rows]``."""
    for step in tl.range(0, tl.cdiv(stop - start, KEYS)):
        begin = tl.multiple_of(start + step * KEYS, KEYS)
        local = tl.arange(0, KEYS)
        keys = begin + local
        k = fetch_tile(key_states, begin, tokens, KEYS, DIM, BLOCK_DIM, EDGE, MAPPED)
        keys_real = real_tokens(mask_base, keys, tokens, MASKED)
        past = load_vector(past_base + begin, local, stop - begin, 0.0, EDGE)
        raw = scores_by_key(k, q, keys, rows, keys_real, EDGE, MASKED, PRECISION)
        scores, _, sender_prior = weak_prior(raw, lse, rows_real, score_scale, MASKED)
        v = fetch_tile(value_states, begin, tokens, KEYS, DIM, BLOCK_DIM, EDGE, MAPPED)
        beliefs = tl.dot(weak_log_messages(sender_prior, logarithm), triangle, scores + past[:, None])
        refined = rounded(tl.exp2(beliefs), v.dtype)
        # The rounded weights that multiply values, so that a row that sees one key returns exactly its value.
        totals = add_rows(totals, refined)
        refined = drop(refined, dropout, rows[None, :], keys[:, None], DROPS)
        out = tl.dot(tl.trans(v), refined, out, input_precision=PRECISION)
    return totals, out


@triton.jit(do_not_specialize=["section"])
def weak_output(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, past_ptr, belief_ptr, lowest_ptr,
    k_map, v_map,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, blocks, section, sums_plane, span_start, lowest_blocks, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, RECEIVES: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Output of a block of the span's rows, each row's base-2 log normaliser, and the block's smallest normaliser."""
    slot, batch, head, first, tokens, line = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    slot = blocks - 1 - slot
    row_start = span_start + slot * ROWS
    lowest_place = line * lowest_blocks + row_start // ROWS
    if row_start >= tokens:
        tl.store(lowest_ptr + lowest_place, 1.0)
        return
    rows = row_start + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    key_states = states_of(k_map, k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    value_states = states_of(v_map, v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    row_base = head_base(0, batch, head, first, heads, length)
    past_base = head_base(past_ptr, batch, head, first, heads, sums_plane)
    past_base += slot_place(slot, span_start, length, ROWS, PACKED)
    mask_base = mask_base_of(mask_ptr, batch, length)
    q = load_rows(q_base, row_start, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    logarithm = pair_logarithm(message)
    triangle = weak_triangle(logarithm, ROWS, RECEIVES, True)
    lse = load_vector(lse_ptr + row_base, rows, tokens, float("inf"), True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    totals = tl.zeros([KEYS // 16, 8, ROWS], tl.float32)
    out = tl.zeros([BLOCK_DIM, ROWS], tl.float32)
    for EDGE in tl.static_range(2):
        start, stop = key_walk(row_start, tokens, ROWS, KEYS, EDGE)
        totals, out = _add_output(
            totals, out, q, lse, rows, rows_real, key_states, value_states, mask_base, past_base,
            start, stop, tokens, score_scale, logarithm, triangle, dropout,
            KEYS, DIM, BLOCK_DIM, EDGE, MASKED, DROPS, PRECISION, MAPPED,
        )  # fmt: skip
    total = tl.sum(tl.sum(totals, 0), 0)
    visible = (lse < float("inf")) & (total > 0)
    out *= tl.where(visible, keep_scale / total, 0.0)[None, :]
    out_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    store_rows(out_base, row_start, tokens, o_row, tl.trans(out), ROWS, DIM, BLOCK_DIM)
    tl.store(
        belief_ptr + row_base + rows, tl.where(visible, tl.log2(total), float("inf")), mask=rows < tokens
    )
    # Messages of a negative strength raise beliefs, which may overflow: those heads need care too.
    lowest = tl.where(message[0] < 0.0, 0.0, tl.min(tl.where(lse < float("inf"), total, 1.0), 0))
    tl.store(lowest_ptr + lowest_place, lowest)

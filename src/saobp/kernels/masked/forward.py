# mypy: ignore-errors
"""Masked attention, forward: three sweeps over the tiles of which an entry may be seen, with weights as logarithms.

1. ``masked_row_sums``: log-sum-exp of every row's scores, in two parts, its largest score and the rest.
2. ``masked_column_messages``: sum of all rows' log messages per key, ``message_sums``.
3. ``masked_output``: refined rows times values.

Padding is no node: its rows send no message, and no row sees its keys. RECEIVES is 1 if a row receives the messages of all
other rows, 2 if its own too, 0 if none: only its own is subtracted.

CAUSAL, under a window: rows receive messages of earlier rows only (RECEIVES is not 2). Sweep 2 goes down the rows and
stores, before each block of rows, the sums so far about the keys that the block sees (``past``); within a tile, the product
with a strictly triangular matrix sums messages of earlier rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import (
    drop,
    head_dropout,
    load_lse,
    load_or_zero,
    load_rows,
    raise_maximum,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate, states_base
from saobp.kernels.masked.tiles import (
    earlier_message_sums,
    load_message,
    log_belief,
    log_message,
    seen_scores,
    table_places,
    visible_range,
)


@triton.jit
def masked_row_sums(
    q_ptr, k_ptr, nodes_ptr, mask_ptr, spans_ptr, lse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, n_batch, n_head, m_batch, m_head, m_row, m_key, s_batch, s_head,
    heads, group, length, blocks, window, lowest_bias, low_plane, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, NODES: tl.constexpr, WINDOWED: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp of each row; plus infinity for a row that sees no key, so that its weights are 0."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, nodes_ptr, False)
    begin = block * ROWS
    rows = begin + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    nodes_base = nodes_ptr + batch * n_batch + head * n_head
    mask_base = states_base(mask_ptr, batch, head, first, m_batch, m_head, m_row)
    view = (mask_base, m_row, m_key, lowest_bias, window, length)
    q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    span_base = spans_ptr + batch * s_batch + head * s_head
    start, stop = visible_range(begin, tokens, window, span_base, ROWS, KEYS, MASK, WINDOWED, CAUSAL, False)
    for place in tl.range(start, stop, KEYS):
        keys = place + tl.arange(0, KEYS)
        k = load_rows(k_base, place, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        real = real_tokens(nodes_base, keys, tokens, NODES)
        scores = seen_scores(
            raw, rows[:, None], keys[None, :], real[None, :], view, score_scale, MASK, WINDOWED, CAUSAL
        )
        top, anchor, shrink = raise_maximum(top, scores)
        total = total * shrink + tl.sum(tl.exp2(scores - anchor[:, None]), 1)
    lse_base = head_base(lse_ptr, batch, head, first, heads, length)
    tl.store(lse_base + rows, tl.where(total > 0, top, float("inf")), mask=rows < tokens)
    total = tl.where(total > 0, total, 1.0)
    tl.store(lse_base + low_plane + rows, tl.log2(total), mask=rows < tokens)


@triton.jit
def masked_column_messages(
    q_ptr, k_ptr, strength_ptr, nodes_ptr, mask_ptr, key_spans_ptr, lse_ptr, message_sums_ptr, past_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, n_batch, n_head, m_batch, m_head, m_row, m_key, s_batch, s_head,
    heads, group, length, blocks, window, back, slots, lowest_bias, low_plane, score_scale, sign,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
    MASK: tl.constexpr, NODES: tl.constexpr, WINDOWED: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum of base-2 log messages about each key, of all rows that are nodes; CAUSAL: of those before each block of rows."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, nodes_ptr, False)
    begin = block * KEYS
    keys = begin + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    nodes_base = nodes_ptr + batch * n_batch + head * n_head
    mask_base = states_base(mask_ptr, batch, head, first, m_batch, m_head, m_row)
    view = (mask_base, m_row, m_key, lowest_bias, window, length)
    row_base = head_base(0, batch, head, first, heads, length)
    message = load_message(strength_ptr, head, sign)
    k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(nodes_base, keys, tokens, NODES)
    message_sums = tl.zeros([KEYS], tl.float32)
    span_base = key_spans_ptr + batch * s_batch + head * s_head
    start, stop = visible_range(begin, tokens, window, span_base, KEYS, ROWS, MASK, WINDOWED, False, CAUSAL)
    for place in tl.range(start, stop, ROWS):
        rows = place + tl.arange(0, ROWS)
        q = load_rows(q_base, place, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, 2, True)
        high = tl.where(real_tokens(nodes_base, rows, tokens, NODES), high, float("inf"))
        scores = seen_scores(
            raw, rows[None, :], keys[:, None], keys_real[:, None], view, score_scale, MASK, WINDOWED, CAUSAL
        )
        a = tl.exp2((scores - high[None, :]) - low[None, :])
        if CAUSAL:
            places = table_places(batch * heads + head, place, keys, back, slots, length, ROWS)
            tl.store(past_ptr + places, message_sums, mask=(keys < tokens) & (keys < place))
        message_sums += tl.sum(log_message(a, message, EXACT), 1)
    if not CAUSAL:
        tl.store(message_sums_ptr + row_base + keys, message_sums, mask=keys < tokens)


@triton.jit
def masked_output(
    q_ptr, k_ptr, v_ptr, strength_ptr, nodes_ptr, mask_ptr, seed_ptr, spans_ptr, lse_ptr, message_sums_ptr, past_ptr,
    out_ptr, rest_ptr, belief_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    n_batch, n_head, m_batch, m_head, m_row, m_key, s_batch, s_head,
    heads, group, length, blocks, window, back, slots, lowest_bias, low_plane, score_scale, sign, drop_threshold, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
    RECEIVES: tl.constexpr, MASK: tl.constexpr, NODES: tl.constexpr, WINDOWED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPS: tl.constexpr, SAVES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of a block of rows; if SAVES also its rounding error, and log2 of the rows' normalisers in two parts."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, nodes_ptr, False)
    begin = block * ROWS
    rows = begin + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    nodes_base = nodes_ptr + batch * n_batch + head * n_head
    mask_base = states_base(mask_ptr, batch, head, first, m_batch, m_head, m_row)
    view = (mask_base, m_row, m_key, lowest_bias, window, length)
    row_base = head_base(0, batch, head, first, heads, length)
    message = load_message(strength_ptr, head, sign)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    KIND: tl.constexpr = v_ptr.dtype.element_ty
    q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, 2, True)
    sends = real_tokens(nodes_base, rows, tokens, NODES)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    span_base = spans_ptr + batch * s_batch + head * s_head
    start, stop = visible_range(begin, tokens, window, span_base, ROWS, KEYS, MASK, WINDOWED, CAUSAL, False)
    for place in tl.range(start, stop, KEYS):
        keys = place + tl.arange(0, KEYS)
        k = load_rows(k_base, place, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        real = real_tokens(nodes_base, keys, tokens, NODES)
        scores = seen_scores(
            raw, rows[:, None], keys[None, :], real[None, :], view, score_scale, MASK, WINDOWED, CAUSAL
        )
        prior = (scores - high[:, None]) - low[:, None]
        a = tl.exp2(prior)
        if CAUSAL and RECEIVES:
            places = table_places(batch * heads + head, begin, keys, back, slots, length, ROWS)
            past = tl.load(past_ptr + places, mask=keys < begin, other=0.0)
            message_sums = earlier_message_sums(
                a, past[None, :], sends[:, None], message, EXACT, True, PRECISION
            )
        else:
            message_sums = load_or_zero(message_sums_ptr + row_base, keys, tokens, True, RECEIVES)[None, :]
        beliefs = log_belief(prior, a, message_sums, sends[:, None], message, RECEIVES, EXACT, CAUSAL)
        top, anchor, shrink = raise_maximum(top, beliefs)
        refined = tl.exp2(beliefs - anchor[:, None]).to(KIND)
        total = total * shrink + tl.sum(refined.to(tl.float32), 1)
        refined = drop(refined, dropout, rows[:, None], keys[None, :], DROPS)
        v = load_rows(v_base, place, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
        out = tl.dot(refined, v, out * shrink[:, None], input_precision=PRECISION)
    top = tl.where(total > 0, top, float("inf"))
    total = tl.where(total > 0, total, 1.0)
    out *= (keep_scale / total)[:, None]
    out_offset = states_base(0, batch, head, first, o_batch, o_head, o_row)
    store_rows(out_ptr + out_offset, begin, tokens, o_row, out, ROWS, DIM, BLOCK_DIM)
    if SAVES:
        if v_ptr.dtype.element_ty != tl.float32:
            rest = out - out.to(KIND).to(tl.float32)
            store_rows(rest_ptr + out_offset, begin, tokens, o_row, rest, ROWS, DIM, BLOCK_DIM)
        belief_base = belief_ptr + row_base + rows
        tl.store(belief_base, top, mask=rows < tokens)
        tl.store(belief_base + low_plane, tl.log2(total), mask=rows < tokens)

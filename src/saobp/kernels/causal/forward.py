# mypy: ignore-errors
"""Strict causal attention: a row receives messages of earlier rows, with a key bias (RECEIVES 2) its own too.

Three sweeps over tiles on or below the diagonal:

1. ``causal_row_sums``: log-sum-exp of every row's scores.
2. ``earlier_messages`` (over keys, from the first row down): ``past[block, key]``, the log-message sums of the rows before each
   block of rows. Rows come in spans of bounded length, so that ``past`` is linear in the sequence; ``message_sums[key]``
   carries the sum from one span to the next and is complete after the last.
3. ``causal_output`` (over rows): refined rows times values. To ``past`` a product with a triangle of ones, which has its diagonal
   if RECEIVES is 2, adds messages of earlier rows of the same tile. Listing factors (RECEIVES 0) take sweeps 1 and 3 only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.sums import as_reference, online_sums, raw_scores, write_lse
from saobp.kernels.causal.block_indexing import key_walk, row_walk, slot_place
from saobp.kernels.library.arithmetic import (
    drop_scaled,
    fetch_tile,
    head_dropout,
    head_message,
    load_lse,
    load_or_zero,
    load_rows,
    load_vector,
    log2_message,
    raise_maximum,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate_sorted, mask_base_of, states_base, states_of
from saobp.kernels.library.packed_bf16 import (
    half_log2,
    pair_logarithm,
    powers,
    sums_by_thread,
    sums_of_logarithms,
)


@triton.jit
def _add_exponentials(
    total, reference, q, key_states, mask_base, start, stop, tokens, score_scale,
    KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Adds to the rows' sums ``total`` the exponentials of keys from ``start`` to ``stop``, which every row of the tile sees."""
    parts = tl.zeros([q.shape[0], 8], tl.float32)
    for begin in tl.range(start, stop, KEYS):
        real = real_tokens(mask_base, begin + tl.arange(0, KEYS), tokens, MASKED)
        k = fetch_tile(key_states, begin, tokens, KEYS, DIM, BLOCK_DIM, TAIL, MAPPED)
        raw = raw_scores(q, k, real, TAIL or MASKED, PRECISION)
        parts += sums_by_thread(powers(raw, reference[:, None], score_scale, PRECISE))
    return total + tl.sum(parts, 1)


@triton.jit
def upper_triangle(SIZE: tl.constexpr, KIND: tl.constexpr, EQUAL: tl.constexpr):
    """``[SIZE, SIZE]``: 1 above the diagonal and, if EQUAL, on it, else 0. ``tile @ upper`` sums over earlier columns."""
    if EQUAL:
        return (tl.arange(0, SIZE)[:, None] <= tl.arange(0, SIZE)[None, :]).to(KIND)
    else:
        return (tl.arange(0, SIZE)[:, None] < tl.arange(0, SIZE)[None, :]).to(KIND)


@triton.jit
def lower_triangle(SIZE: tl.constexpr, KIND: tl.constexpr, EQUAL: tl.constexpr):
    """``[SIZE, SIZE]``: 1 below the diagonal and, if EQUAL, on it, else 0. ``lower @ tile`` sums over earlier rows."""
    if EQUAL:
        return (tl.arange(0, SIZE)[:, None] >= tl.arange(0, SIZE)[None, :]).to(KIND)
    else:
        return (tl.arange(0, SIZE)[:, None] > tl.arange(0, SIZE)[None, :]).to(KIND)


@triton.jit
def log_messages(a, rows_real, message, PRECISE: tl.constexpr, MASKED: tl.constexpr):
    """log2(1 - gamma a) of a tile, 0 for padding rows. ``rows_real`` is shaped to broadcast to it."""
    if PRECISE == 0:
        logarithm = pair_logarithm(message)
        messages = half_log2(a.to(tl.float16), logarithm).to(tl.float32) * logarithm[0]
    else:
        messages = log2_message(a, message, PRECISE)
    if MASKED:
        messages = tl.where(rows_real, messages, 0.0)
    return messages


@triton.jit
def add_compensated(message_sums, lost, messages, PRECISE: tl.constexpr):
    """Adds messages to the sums; in full float32 with compensation (Knuth's TwoSum): ``lost`` gathers the rounding errors."""
    total = message_sums + messages
    if PRECISE == 2:
        added = total - message_sums
        lost += (message_sums - (total - added)) + (messages - added)
    return total, lost


@triton.jit
def load_message_sums(message_sums_base, low_plane, keys, tokens, PRECISE: tl.constexpr):
    """Message sums of keys and, in full float32, what rounding lost of them; 0 from ``tokens`` on."""
    message_sums = load_vector(message_sums_base, keys, tokens, 0.0, True)
    if PRECISE == 2:
        return message_sums, load_vector(message_sums_base + low_plane, keys, tokens, 0.0, True)
    return message_sums, tl.zeros_like(message_sums)


@triton.jit
def store_message_sums(
    message_sums_base, low_plane, keys, tokens, real, message_sums, lost, PRECISE: tl.constexpr
):
    """What ``load_message_sums`` loads; 0 for padding keys."""
    tl.store(message_sums_base + keys, tl.where(real, message_sums, 0.0), mask=keys < tokens)
    if PRECISE == 2:
        tl.store(message_sums_base + low_plane + keys, tl.where(real, lost, 0.0), mask=keys < tokens)


@triton.jit
def causal_scores(
    q, k, rows, keys, keys_real, EDGE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """Raw products ``[rows, keys]``; minus infinity for padding and, in an EDGE tile, for later keys."""
    raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if EDGE:
        raw = tl.where(keys[None, :] <= rows[:, None], raw, float("-inf"))
    if MASKED:
        raw = tl.where(keys_real[None, :], raw, float("-inf"))
    return raw


@triton.jit
def scores_by_key(
    k, q, keys, rows, keys_real, EDGE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """``causal_scores`` transposed: raw products ``[keys, rows]``."""
    raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if EDGE:
        raw = tl.where(keys[:, None] <= rows[None, :], raw, float("-inf"))
    if MASKED:
        raw = tl.where(keys_real[:, None], raw, float("-inf"))
    return raw


@triton.jit(do_not_specialize=["section"])
def causal_row_sums(
    q_ptr, k_ptr, mask_ptr, cu_ptr, lse_ptr, k_map,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, group, length, blocks, section, low_plane, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp of each row; plus infinity for a row that sees no key, so that its weights are 0."""
    block, batch, head, first, tokens, _ = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    block = blocks - 1 - block
    if block * ROWS >= tokens:
        return
    rows = block * ROWS + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    key_states = states_of(k_map, k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    mask_base = mask_base_of(mask_ptr, batch, length)
    q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    edge = block * ROWS // KEYS * KEYS
    stop = min(block * ROWS + ROWS, tokens)

    # The largest score near the diagonal is the reference for the whole row: no running maximum is needed.
    reference = tl.full([ROWS], float("-inf"), tl.float32)
    for begin in tl.range(edge, stop, KEYS):
        keys = begin + tl.arange(0, KEYS)
        k = fetch_tile(key_states, begin, tokens, KEYS, DIM, BLOCK_DIM, True, MAPPED)
        real = real_tokens(mask_base, keys, tokens, MASKED)
        reference = tl.maximum(
            reference, tl.max(causal_scores(q, k, rows, keys, real, True, MASKED, PRECISION), 1)
        )
    reference = as_reference(reference, score_scale, PRECISE)
    total = tl.zeros([ROWS], tl.float32)
    for begin in tl.range(edge, stop, KEYS):
        keys = begin + tl.arange(0, KEYS)
        k = fetch_tile(key_states, begin, tokens, KEYS, DIM, BLOCK_DIM, True, MAPPED)
        real = real_tokens(mask_base, keys, tokens, MASKED)
        raw = causal_scores(q, k, rows, keys, real, True, MASKED, PRECISION)
        total += tl.sum(tl.exp2(relative(raw, reference[:, None], 0.0, score_scale, PRECISE)), 1)
    total = _add_exponentials(
        total, reference, q, key_states, mask_base, 0, edge, tokens, score_scale,
        KEYS, DIM, BLOCK_DIM, False, PRECISE, MASKED, PRECISION, MAPPED,
    )  # fmt: skip

    # A score far above the reference overflowed, or all underflowed: use a running maximum.
    if (tl.max(total) > 1e37) | (tl.min(total) < 1e-30):
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for begin in tl.range(0, stop, KEYS):
            keys = begin + tl.arange(0, KEYS)
            k = fetch_tile(key_states, begin, tokens, KEYS, DIM, BLOCK_DIM, True, MAPPED)
            real = real_tokens(mask_base, keys, tokens, MASKED)
            raw = causal_scores(q, k, rows, keys, real, True, MASKED, PRECISION)
            top, total = online_sums(top, total, raw, score_scale)
        reference = as_reference(top, score_scale, PRECISE)
    lse_base = head_base(lse_ptr, batch, head, first, heads, length)
    write_lse(lse_base, low_plane, rows, tokens, reference, total, PRECISE)


@triton.jit
def _add_earlier(
    message_sums, lost, k, keys, keys_real, message, q_base, q_row, mask_base, lse_base, low_plane, past_base, length,
    span_start, start, stop, tokens, score_scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    EDGE: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows from ``start`` to ``stop``: stores the sums before each block of them in ``past``, then adds its messages."""
    for begin in tl.range(start, stop, ROWS):
        begin = tl.multiple_of(begin, ROWS)
        local = tl.arange(0, ROWS)
        rows = begin + local
        past_row = past_base + slot_place((begin - span_start) // ROWS, span_start, length, ROWS, PACKED)
        seen = keys < min(tokens, begin + ROWS)
        tl.store(past_row + keys, tl.where(keys_real, message_sums + lost, 0.0), mask=seen)
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, EDGE)
        high, low = load_lse(lse_base + begin, low_plane, local, tokens - begin, PRECISE, EDGE)
        if MASKED:
            high = tl.where(real_tokens(mask_base, rows, tokens, MASKED), high, float("inf"))
        raw = scores_by_key(k, q, keys, rows, keys_real, EDGE, False, PRECISION)
        a = tl.exp2(relative(raw, high[None, :], low[None, :], score_scale, PRECISE))
        if PRECISE == 1:
            sent = sums_of_logarithms(1.0 - message[0] * a)
        else:
            sent = log_messages(a, True, message, PRECISE, False)
        message_sums, lost = add_compensated(message_sums, lost, tl.sum(sent, 1), PRECISE)
    return message_sums, lost


@triton.jit(do_not_specialize=["section"])
def earlier_messages(
    q_ptr, k_ptr, mask_ptr, cu_ptr, lse_ptr, strength_ptr, past_ptr, message_sums_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, group, length, blocks, section, sums_plane, span_start, span_stop, low_plane, score_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Log-message sums of a block of keys: before every block of the span's rows (``past``), and after the span."""
    block, batch, head, first, tokens, _ = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    row_base = head_base(0, batch, head, first, heads, length)
    past_base = head_base(past_ptr, batch, head, first, heads, sums_plane)
    mask_base = mask_base_of(mask_ptr, batch, length)
    lse_base = lse_ptr + row_base
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    # Rows of earlier spans have seen only keys before the span.
    message_sums, lost = load_message_sums(
        message_sums_ptr + row_base, low_plane, keys, min(span_start, tokens), PRECISE
    )
    walk = row_walk(block * KEYS, span_start, span_stop, tokens, ROWS, KEYS)
    for leg in tl.static_range(3):
        message_sums, lost = _add_earlier(
            message_sums, lost, k, keys, keys_real, message, q_base, q_row, mask_base, lse_base, low_plane, past_base,
            length, span_start, walk[leg], walk[leg + 1], tokens, score_scale,
            ROWS, DIM, BLOCK_DIM, leg != 1, PRECISE, MASKED, PACKED, PRECISION,
        )  # fmt: skip
    store_message_sums(
        message_sums_ptr + row_base, low_plane, keys, tokens, keys_real, message_sums, lost, PRECISE
    )


@triton.jit
def prior_and_beliefs(
    scores, rows_real, past, message, ROWS: tl.constexpr, KIND: tl.constexpr, RECEIVES: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Prior weights of a tile ``[ROWS, keys]``, and the base-2 logarithms of its refined weights before normalisation.

    ``past`` ``[1, keys]``: sums of the rows before the tile. Messages of the tile's earlier rows are added and, if RECEIVES is 2,
    the row's own. RECEIVES 0 (listing factors): the weight is divided by the row's own message."""
    a = tl.exp2(scores)
    messages = log_messages(a, rows_real, message, PRECISE, MASKED)
    if RECEIVES and PRECISE == 2:
        beliefs = scores + (
            past + tl.dot(lower_triangle(ROWS, KIND, RECEIVES == 2), messages, input_precision="ieee")
        )
    elif RECEIVES:
        # The sum has at most ROWS terms, so half precision suffices.
        beliefs = tl.dot(lower_triangle(ROWS, KIND, RECEIVES == 2), messages.to(KIND), scores + past)
    else:
        beliefs = scores - messages
    return a, beliefs


@triton.jit
def beliefs_by_key(
    scores, messages, past, ROWS: tl.constexpr, KIND: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr
):  # fmt: skip
    """Log beliefs of a tile ``[keys, ROWS]``, as of ``prior_and_beliefs``, from its log messages. ``past`` is ``[keys, 1]``."""
    if RECEIVES and PRECISE == 2:
        return scores + (
            past + tl.dot(messages, upper_triangle(ROWS, KIND, RECEIVES == 2), input_precision="ieee")
        )
    if RECEIVES:
        return tl.dot(messages.to(KIND), upper_triangle(ROWS, KIND, RECEIVES == 2), scores + past)
    return scores - messages


@triton.jit
def _add_output(
    total, top, out, q, high, low, rows, rows_real, k_base, k_row, v_base, v_row, mask_base, past_base,
    start, stop, tokens, score_scale, message, dropout,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGE: tl.constexpr,
    KIND: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of refined rows over keys from ``start`` to ``stop``: the rows' sums, maxima and output so far."""
    for begin in tl.range(start, stop, KEYS):
        begin = tl.multiple_of(begin, KEYS)
        local = tl.arange(0, KEYS)
        keys = begin + local
        k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, EDGE)
        real = real_tokens(mask_base, keys, tokens, MASKED)
        raw = causal_scores(q, k, rows, keys, real, EDGE, MASKED, PRECISION)
        scores = relative(raw, high[:, None], low[:, None], score_scale, PRECISE)
        past = load_or_zero(past_base + begin, local, stop - begin, EDGE, RECEIVES)
        _, beliefs = prior_and_beliefs(
            scores, rows_real[:, None], past[None, :], message, ROWS, KIND, RECEIVES, PRECISE, MASKED
        )
        top, anchor, shrink = raise_maximum(top, beliefs)
        refined = tl.exp2(beliefs - anchor[:, None])
        total = total * shrink + tl.sum(refined, 1)
        refined = drop_scaled(refined, dropout, rows[:, None], keys[None, :], DROPS)
        v = load_rows(v_base, begin, tokens, v_row, KEYS, DIM, BLOCK_DIM, EDGE)
        out = tl.dot(refined.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    return total, top, out


@triton.jit(do_not_specialize=["section"])
def causal_output(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, past_ptr, belief_ptr, lowest_ptr, rest_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, blocks, section, sums_plane, span_start, low_plane, lowest_blocks, lowest_sum,
    score_scale, drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHECKED: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    RESTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of a block of the span's rows, and ``belief``, the base-2 logarithm of each refined row's normaliser.

    RESTS: also ``rest`` ``[batch, heads, length, DIM]``, what rounding the output left.
    CHECKED: recomputes only the blocks that ``weak_output`` recorded as near underflow."""
    slot, batch, head, first, tokens, line = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    slot = blocks - 1 - slot
    row_start = span_start + slot * ROWS
    if row_start >= tokens:
        return
    if CHECKED:
        lowest_place = line * lowest_blocks + row_start // ROWS
        if tl.load(lowest_ptr + lowest_place) >= lowest_sum:
            return
    KIND: tl.constexpr = tl.float32 if PRECISE == 2 else tl.float16
    rows = row_start + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    row_base = head_base(0, batch, head, first, heads, length)
    past_base = head_base(past_ptr, batch, head, first, heads, sums_plane)
    past_base += slot_place(slot, span_start, length, ROWS, PACKED)
    mask_base = mask_base_of(mask_ptr, batch, length)
    q = load_rows(q_base, row_start, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for EDGE in tl.static_range(2):
        start, stop = key_walk(row_start, tokens, ROWS, KEYS, EDGE)
        total, top, out = _add_output(
            total, top, out, q, high, low, rows, rows_real, k_base, k_row, v_base, v_row, mask_base, past_base,
            start, stop, tokens, score_scale, message, dropout,
            ROWS, KEYS, DIM, BLOCK_DIM, EDGE, KIND, RECEIVES, PRECISE, MASKED, DROPS, PRECISION,
        )  # fmt: skip
    visible = (high < float("inf")) & (total > 0)
    out *= tl.where(visible, 1.0 / total, 0.0)[:, None]
    out_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    store_rows(out_base, row_start, tokens, o_row, out, ROWS, DIM, BLOCK_DIM)
    if RESTS:
        rest = out - out.to(out_ptr.dtype.element_ty).to(tl.float32)
        store_rows(rest_ptr + row_base * DIM, row_start, tokens, DIM, rest, ROWS, DIM, BLOCK_DIM)
    # In full float32 the normaliser has two parts, as the log-sum-exp does.
    summed = tl.log2(total)
    if PRECISE == 2:
        tl.store(belief_ptr + low_plane + row_base + rows, tl.where(visible, summed, 0.0), mask=rows < tokens)
    else:
        top += summed
    tl.store(belief_ptr + row_base + rows, tl.where(visible, top, float("inf")), mask=rows < tokens)

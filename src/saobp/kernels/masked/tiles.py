# mypy: ignore-errors
"""Masked tiles: which entries of a tile are seen, which tiles a block needs, and the weights of a tile.

An entry is *seen* if the row may attend to the key: inside the window, allowed by the mask, and the key is a node of the
graph (no padding). ``view`` is what decides that: pointer to the mask of this head, its row and key strides, ``lowest_bias`` (a
mask of numbers hides entries up to it), the window and the length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import MAX_STRENGTH, head_message, log2_message

SPAN_BLOCK = 64
"""Rows per span: ``mask_spans`` finds the first and last key that the mask lets any of them see; and likewise keys, and rows."""
_SPAN_BLOCK = tl.constexpr(SPAN_BLOCK)


@triton.jit
def seen_scores(
    raw, rows, keys, keys_real, view, score_scale, MASK: tl.constexpr, WINDOWED: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Base-2 scores of a tile from raw products; minus infinity where unseen.

    ``rows``, ``keys`` and ``keys_real`` are shaped to broadcast to the tile. MASK 1: not 0 is seen; 2: numbers to add.
    """
    mask_base, mask_row, mask_key, lowest_bias, window, length = view
    scores = raw * score_scale
    seen = keys_real
    if WINDOWED:
        distance = rows - keys
        seen = seen & (distance < window) & (distance > (-1 if CAUSAL else -window))
    if MASK != 0:
        places = mask_base + (rows.to(tl.int64) * mask_row + keys.to(tl.int64) * mask_key)
        entries = tl.load(places, mask=(rows < length) & (keys < length), other=0)
        if MASK == 1:
            seen = seen & (entries != 0)
        else:
            added = entries.to(tl.float32)
            seen = seen & (added > lowest_bias)
            scores += added * 1.4426950408889634
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def visible_range(
    begin, tokens, window, span_base, SIZE: tl.constexpr, STEP: tl.constexpr, MASK: tl.constexpr, WINDOWED: tl.constexpr,
    EARLIER: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """First key, rounded down to a multiple of STEP, and last key (exclusive) that SIZE rows from ``begin`` on can see; or rows that
    can see SIZE keys. Causal rows see EARLIER keys only, and keys are seen by LATER rows only."""
    first, last = begin * 0, begin * 0 + tokens
    if WINDOWED:
        first = tl.maximum(begin if LATER else begin - window + 1, first)
        last = tl.minimum(begin + SIZE if EARLIER else begin + SIZE - 1 + window, last)
    if MASK != 0:
        low, high = last, first
        for part in tl.static_range((SIZE + _SPAN_BLOCK - 1) // _SPAN_BLOCK):
            span_block = begin // _SPAN_BLOCK + part
            inside = span_block * _SPAN_BLOCK < tokens
            low = tl.minimum(low, tl.load(span_base + 2 * span_block, mask=inside, other=2147483647))
            high = tl.maximum(high, tl.load(span_base + 2 * span_block + 1, mask=inside, other=0))
        first, last = tl.maximum(first, low), tl.minimum(last, high)
    return first // STEP * STEP, last


@triton.jit
def mask_spans(
    mask_ptr, spans_ptr, m_batch, m_head, m_outer, m_inner, mask_heads, length, span_blocks, lowest_bias,
    SIZE: tl.constexpr, STEP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """``spans`` ``[.., 2]``: for SIZE rows the first and last (exclusive) key that the mask lets any of them see, or for keys the rows."""
    pid = tl.program_id(0)
    span_block, line = pid % span_blocks, pid // span_blocks
    base = mask_ptr + (line // mask_heads).to(tl.int64) * m_batch + (line % mask_heads).to(tl.int64) * m_head
    outer = span_block * SIZE + tl.arange(0, SIZE)[:, None]
    low, high = span_block * 0 + length, span_block * 0
    for start in tl.range(0, length, STEP):
        inner = start + tl.arange(0, STEP)[None, :]
        inside = (outer < length) & (inner < length)
        places = base + (outer.to(tl.int64) * m_outer + inner.to(tl.int64) * m_inner)
        entries = tl.load(places, mask=inside, other=0)
        if MASK == 1:
            seen = inside & (entries != 0)
        else:
            seen = inside & (entries.to(tl.float32) > lowest_bias)
        low = tl.minimum(low, tl.min(tl.min(tl.where(seen, inner, length), 1), 0))
        high = tl.maximum(high, tl.max(tl.max(tl.where(seen, inner + 1, 0), 1), 0))
    tl.store(spans_ptr + 2 * pid, low)
    tl.store(spans_ptr + 2 * pid + 1, high)


@triton.jit
def strict_triangle(SIZE: tl.constexpr, UPPER: tl.constexpr):
    """``[SIZE, SIZE]``: 1 above (UPPER) or below the diagonal, else 0. Products with it sum over earlier or later rows of a tile."""
    line, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    return tl.where(line < column if UPPER else line > column, 1.0, 0.0)


@triton.jit
def table_places(line, begin, keys, back, slots, length, ROWS: tl.constexpr):
    """Offsets of ``keys`` in ``past`` or ``later`` ``[lines, blocks of rows, slots]``, for the block of rows from ``begin`` on.

    A block has a slot for each key that it may see: the first is ``back`` keys before its first row.
    """
    block = line.to(tl.int64) * ((length + ROWS - 1) // ROWS) + begin // ROWS
    return block * slots + (keys - begin + back)


@triton.jit
def load_message(strength_ptr, head, sign):
    """A head's ``message``: gamma, log2(1 - gamma), in all digits since the strength gives it, and gamma / (1 - gamma)."""
    gamma, r0, r1, r2, l0, l1, l2 = head_message(strength_ptr, head, sign, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    strength = tl.minimum(tl.load(strength_ptr + head).to(tl.float32) * sign, MAX_STRENGTH)
    log2_rest = -1.4426950408889634 * strength
    return gamma, log2_rest, gamma * tl.exp2(-log2_rest)


@triton.jit
def log_message(a, message, EXACT: tl.constexpr):
    """log2(1 - gamma a). EXACT: in all digits of float32, where gamma a > 1/2 as log2(1 - gamma) plus the log2 of their ratio."""
    gamma, log2_rest, odds = message
    if EXACT:
        near_one = log2_rest + tl.log2(1.0 + odds * (1.0 - a))
        return tl.where(gamma * a > 0.5, near_one, log2_message(a, (gamma, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 2))
    else:
        return tl.log2(1.0 - gamma * a)


@triton.jit
def earlier_message_sums(
    a, past, sends, message, EXACT: tl.constexpr, BY_ROWS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Causal: the log-message sums that each row of a tile ``[rows, keys]`` (BY_ROWS), or ``[keys, rows]``, receives: ``past``, of the
    rows before the tile, plus those of earlier rows in it. ``sends``: rows that send messages."""
    messages = tl.where(sends, log_message(a, message, EXACT), 0.0)
    if EXACT:
        # ``coarse``: rounded to multiples of 2^-10, which add up without rounding; the rest is small beside them. Subtracted,
        # because the compiler lets the product in past + product accumulate into past, and then every addition rounds.
        coarse = (messages + 12288.0) - 12288.0
        past = past - _sum_earlier(-coarse, BY_ROWS, PRECISION)
        return past - _sum_earlier(coarse - messages, BY_ROWS, PRECISION)
    else:
        return past + _sum_earlier(messages, BY_ROWS, PRECISION)


@triton.jit
def _sum_earlier(messages, BY_ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """For each row of a tile, the sum over its earlier rows."""
    if BY_ROWS:
        return tl.dot(strict_triangle(messages.shape[0], False), messages, input_precision=PRECISION)
    else:
        return tl.dot(messages, strict_triangle(messages.shape[1], True), input_precision=PRECISION)


@triton.jit
def weights(
    scores, lse, belief, message_sums, sends, message,
    RECEIVES: tl.constexpr, EXACT: tl.constexpr, CAUSAL: tl.constexpr, BY_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Prior and refined weights of a tile, computed as logarithms.

    lse, belief:  log2 of the rows' normalisers, before and after messages, in two parts each
    message_sums: log-message sums of keys (CAUSAL: of the rows before the tile)
    sends:        rows that send messages: all but padding
    """
    prior = (scores - lse[0]) - lse[1]
    a = tl.exp2(prior)
    if CAUSAL and RECEIVES:
        message_sums = earlier_message_sums(a, message_sums, sends, message, EXACT, BY_ROWS, PRECISION)
    refined = log_belief(prior, a, message_sums, sends, message, RECEIVES, EXACT, CAUSAL)
    return a, tl.exp2((refined - belief[0]) - belief[1])


@triton.jit
def log_belief(
    prior, a, message_sums, sends, message, RECEIVES: tl.constexpr, EXACT: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Base-2 logarithms of refined weights before normalisation: prior plus log messages received. The row's own is subtracted,
    unless it belongs to them (RECEIVES 2) or ``message_sums`` has it not (CAUSAL)."""
    if RECEIVES:
        prior += message_sums
    if RECEIVES != 2 and not (CAUSAL and RECEIVES):
        prior -= tl.where(sends, log_message(a, message, EXACT), 0.0)
    return prior

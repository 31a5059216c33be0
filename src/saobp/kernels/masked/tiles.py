"""Masked tiles: which entries a tile may use, which tiles a block needs, and the weights of a tile.

An entry is *seen* if the row may attend to the key: inside the window, allowed by the mask, and the key is a node of the
graph (no padding). ``view`` is what decides that: pointer to the mask of this head, its two strides, ``lowest`` (a mask of
numbers hides the entries up to it), the window and the length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import MAX_STRENGTH, head_message, log2_message

GRAIN = 64
"""Rows of a block for which ``mask_spans`` finds the first and last key that the mask shows; likewise keys and rows."""
_GRAIN = tl.constexpr(GRAIN)


@triton.jit
def seen_scores(
    raw, rows, keys, keys_real, view, score_scale, MASK: tl.constexpr, WINDOWED: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Base-2 scores of a tile from raw products; minus infinity where unseen.

    ``rows``, ``keys`` and ``keys_real`` are shaped to broadcast to the tile. MASK 1: not 0 is seen; 2: numbers to add.
    """
    mask_base, mask_row, mask_key, lowest, window, length = view
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
            seen = seen & (added > lowest)
            scores += added * 1.4426950408889634
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def reach(
    begin, tokens, window, span_base, SIZE: tl.constexpr, STEP: tl.constexpr, MASK: tl.constexpr, WINDOWED: tl.constexpr,
    EARLIER: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """First and last (exclusive) token that a block of SIZE tokens from ``begin`` on can need, the first a multiple of
    STEP. Causal rows need EARLIER keys only, and keys LATER rows only."""
    first, last = begin * 0, begin * 0 + tokens
    if WINDOWED:
        first = tl.maximum(begin if LATER else begin - window + 1, first)
        last = tl.minimum(begin + SIZE if EARLIER else begin + SIZE - 1 + window, last)
    if MASK != 0:
        low, high = last, first
        for part in tl.static_range((SIZE + _GRAIN - 1) // _GRAIN):
            grain = begin // _GRAIN + part
            inside = grain * _GRAIN < tokens
            low = tl.minimum(low, tl.load(span_base + 2 * grain, mask=inside, other=2147483647))
            high = tl.maximum(high, tl.load(span_base + 2 * grain + 1, mask=inside, other=0))
        first, last = tl.maximum(first, low), tl.minimum(last, high)
    return first // STEP * STEP, last


@triton.jit
def mask_spans(
    mask_ptr, spans_ptr, m_batch, m_head, m_outer, m_inner, mask_heads, length, grains, lowest,
    SIZE: tl.constexpr, STEP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """For SIZE consecutive rows (or keys) the first and last (exclusive) key (row) that the mask lets any of them see."""
    pid = tl.program_id(0)
    grain, line = pid % grains, pid // grains
    base = mask_ptr + (line // mask_heads).to(tl.int64) * m_batch + (line % mask_heads).to(tl.int64) * m_head
    outer = grain * SIZE + tl.arange(0, SIZE)[:, None]
    low, high = grain * 0 + length, grain * 0
    for start in tl.range(0, length, STEP):
        inner = start + tl.arange(0, STEP)[None, :]
        inside = (outer < length) & (inner < length)
        places = base + (outer.to(tl.int64) * m_outer + inner.to(tl.int64) * m_inner)
        entries = tl.load(places, mask=inside, other=0)
        if MASK == 1:
            seen = inside & (entries != 0)
        else:
            seen = inside & (entries.to(tl.float32) > lowest)
        low = tl.minimum(low, tl.min(tl.min(tl.where(seen, inner, length), 1), 0))
        high = tl.maximum(high, tl.max(tl.max(tl.where(seen, inner + 1, 0), 1), 0))
    tl.store(spans_ptr + 2 * pid, low)
    tl.store(spans_ptr + 2 * pid + 1, high)


@triton.jit
def strict_triangle(SIZE: tl.constexpr, UPPER: tl.constexpr):
    """1 above (UPPER) or below the diagonal, else 0: as a factor it sums what comes before or after within a tile."""
    line, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    return tl.where(line < column if UPPER else line > column, 1.0, 0.0)


@triton.jit
def table_places(line, begin, keys, back, slots, length, ROWS: tl.constexpr):
    """Places of keys in ``past`` or ``future`` ``[lines, blocks of rows, slots]``, for the block that begins with that row;
    a block's first slot is the key ``back`` before its first row."""
    block = line.to(tl.int64) * ((length + ROWS - 1) // ROWS) + begin // ROWS
    return block * slots + (keys - begin + back)


@triton.jit
def own_message(strength_ptr, head, sign):
    """gamma of a head, log2(1 - gamma), which the strength gives in all digits, and gamma / (1 - gamma)."""
    gamma, r0, r1, r2, l0, l1, l2 = head_message(strength_ptr, head, sign, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    strength = tl.minimum(tl.load(strength_ptr + head).to(tl.float32) * sign, MAX_STRENGTH)
    lowest = -1.4426950408889634 * strength
    return gamma, lowest, gamma * tl.exp2(-lowest)


@triton.jit
def log2_own(a, message, EXACT: tl.constexpr):
    """log2(1 - gamma a). EXACT in all digits of float32: where gamma a is near 1, as log2(1 - gamma) and the rest."""
    gamma, lowest, odds = message
    if EXACT:
        near_one = lowest + tl.log2(1.0 + odds * (1.0 - a))
        return tl.where(gamma * a > 0.5, near_one, log2_message(a, (gamma, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 2))
    else:
        return tl.log2(1.0 - gamma * a)


@triton.jit
def earlier_message_sums(
    a, past, sends, message, EXACT: tl.constexpr, BY_ROWS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Causal: sum of log messages about each key that each row of a tile ``[rows, keys]`` (BY_ROWS) or ``[keys, rows]``
    receives, from the rows before the tile (``past``) and the earlier rows in it."""
    messages = tl.where(sends, log2_own(a, message, EXACT), 0.0)
    if EXACT:
        # Multiples of 2^-10 add up without rounding, and beside them the rest is small. Subtracted, because the compiler
        # makes the product in past + product go on from past, and then every addition rounds.
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
    """Prior and refined weights of a tile, all in the log domain.

    ``lse`` and ``belief``: log2 of the rows' normalisers, before and after messages, in two parts each; ``message_sums``:
    of log messages about each key (CAUSAL: of the rows before the tile); ``sends``: rows that send messages, all but
    padding. Their own is subtracted as in ``log_belief``.
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
    """Unnormalised base-2 log beliefs: prior plus received messages. The row's own message is subtracted, unless RECEIVES
    is 2 or, CAUSAL, ``message_sums`` excludes it."""
    if RECEIVES:
        prior += message_sums
    if RECEIVES != 2 and not (CAUSAL and RECEIVES):
        prior -= tl.where(sends, log2_own(a, message, EXACT), 0.0)
    return prior

# mypy: ignore-errors
"""Long bidirectional sequences: row and key sums that output and gradients need, in memory linear in length.

1. ``row_sums``: log-sum-exp of every row's scores.
2. ``column_messages``: sum of all rows' log messages per key, gridded over keys, so without atomics;
   ``key_weights`` turns it into factors at most 1.

STRIDE above 1: only every STRIDE-th real row sends messages (``library.senders``), so both sweeps take those rows alone.

Tiles of 128 rows (in sweep 2, keys) are processed in two halves with separate products: while the tensor cores
compute one half's product, exponentials of the other are taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import (
    fetch_tile,
    finite,
    head_message,
    load_lse,
    load_rows,
    log2_message,
    real_tokens,
    relative,
)
from saobp.kernels.library.indexing import head_base, locate, mask_base_of, row_bases, states_base, states_of
from saobp.kernels.library.packed_bf16 import (
    half_log2,
    half_sums,
    pair_logarithm,
    powers,
    sums_by_thread,
    sums_of_logarithms,
)
from saobp.kernels.library.senders import load_senders, sending_rows


@triton.jit
def raw_scores(q, k, keys_real, TAIL: tl.constexpr, PRECISION: tl.constexpr):
    """Q K^T of a tile ``[rows, keys]``; if TAIL, minus infinity for keys that are not real."""
    raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if TAIL:
        raw = tl.where(keys_real[None, :], raw, float("-inf"))
    return raw


@triton.jit
def as_reference(top, score_scale, PRECISE: tl.constexpr):
    """What a row's exponentials are relative to: its largest score, raw if PRECISE is 2; 0 for a row that sees no key."""
    reference = finite(top)
    if PRECISE != 2:
        reference *= score_scale
    return reference


@triton.jit
def online_sums(top, total, raw, score_scale):
    """Online softmax: the rows' running maximum and sum of exponentials after a tile ``[rows, keys]`` of raw products."""
    raised = tl.maximum(top, tl.max(raw, 1))
    anchor = finite(raised)
    added = tl.sum(tl.exp2((raw - anchor[:, None]) * score_scale), 1)
    return raised, total * tl.exp2((top - anchor) * score_scale) + added


@triton.jit
def write_lse(lse_base, low_plane, rows, tokens, reference, total, PRECISE: tl.constexpr):
    """Log-sum-exp from reference and sum, in full float32 in two parts; plus infinity for a row that sees no key."""
    if PRECISE == 2:
        tl.store(lse_base + low_plane + rows, tl.where(total > 0, tl.log2(total), 0.0), mask=rows < tokens)
    else:
        reference += tl.log2(total)
    tl.store(lse_base + rows, tl.where(total > 0, reference, float("inf")), mask=rows < tokens)


@triton.jit
def first_sums(q, k, keys_real, score_scale, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """Each row's largest score in the first tile, as reference, and row sums of that tile's exponentials in parts ``[rows, 8]``."""
    raw = raw_scores(q, k, keys_real, True, PRECISION)
    reference = as_reference(tl.max(raw, 1), score_scale, PRECISE)
    return reference, exponentials(raw, reference, score_scale, PRECISE)


@triton.jit
def exponentials(raw, reference, score_scale, PRECISE: tl.constexpr):
    """Row sums of a tile's exponentials, in parts ``[rows, 8]``."""
    return sums_by_thread(powers(raw, reference[:, None], score_scale, PRECISE))


@triton.jit
def store_lse(
    lse_base, low_plane, rows, count, reference, parts, q, k_base, k_row, mask_base, tokens, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the log-sum-exp of ``rows``, of which there are ``count``.

    If a score far above the reference overflowed, or all underflowed, recomputes with a running maximum, in narrow tiles.
    """
    KEYS: tl.constexpr = 32
    total = tl.sum(parts, 1)
    if (tl.max(total) > 1e37) | (tl.min(total) < 1e-30):
        top = tl.full([q.shape[0]], float("-inf"), tl.float32)
        total = tl.zeros([q.shape[0]], tl.float32)
        for start in tl.range(0, tokens, KEYS):
            real = real_tokens(mask_base, start + tl.arange(0, KEYS), tokens, MASKED)
            k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
            raw = raw_scores(q, k, real, True, PRECISION)
            top, total = online_sums(top, total, raw, score_scale)
        reference = as_reference(top, score_scale, PRECISE)
    write_lse(lse_base, low_plane, rows, count, reference, total, PRECISE)


@triton.jit
def row_sums(
    q_ptr, k_ptr, mask_ptr, cu_ptr, senders_ptr, lse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, group, length, blocks, low_plane, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp of each sending row; plus infinity for a row that sees no key, so that its weights are 0."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    sender_list, count, rows_per_sender = sending_rows(senders_ptr, batch, tokens, length, STRIDE, MASKED)
    if block * ROWS >= count:
        return
    SPLIT: tl.constexpr = ROWS == 128
    PART: tl.constexpr = 64 if SPLIT else ROWS
    begin = block * ROWS
    rows = begin + tl.arange(0, PART)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    mask_base = mask_base_of(mask_ptr, batch, length)
    lse_base = head_base(lse_ptr, batch, head, first, heads, length)

    # The first tile's largest score is the reference for the whole row: no running maximum is needed.
    real = real_tokens(mask_base, tl.arange(0, KEYS), tokens, MASKED)
    k = load_rows(k_base, 0, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    q = load_senders(q_base, sender_list, begin, count, q_row, PART, DIM, BLOCK_DIM, True, STRIDE, MASKED)
    reference, parts = first_sums(q, k, real, score_scale, PRECISE, PRECISION)
    if SPLIT:
        q_2 = load_senders(
            q_base, sender_list, begin + PART, count, q_row, PART, DIM, BLOCK_DIM, True, STRIDE, MASKED
        )
        reference_2, parts_2 = first_sums(q_2, k, real, score_scale, PRECISE, PRECISION)
    for start in tl.range(KEYS, tokens, KEYS):
        real = real_tokens(mask_base, start + tl.arange(0, KEYS), tokens, MASKED)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        raw = raw_scores(q, k, real, TAIL or MASKED, PRECISION)
        if SPLIT:
            raw_2 = raw_scores(q_2, k, real, TAIL or MASKED, PRECISION)
        parts += exponentials(raw, reference, score_scale, PRECISE)
        if SPLIT:
            parts_2 += exponentials(raw_2, reference_2, score_scale, PRECISE)
    store_lse(
        lse_base, low_plane, rows, count, reference, parts, q, k_base, k_row, mask_base, tokens, score_scale,
        DIM, BLOCK_DIM, PRECISE, MASKED, PRECISION,
    )  # fmt: skip
    if SPLIT:
        store_lse(
            lse_base, low_plane, rows + PART, count, reference_2, parts_2, q_2, k_base, k_row, mask_base, tokens, score_scale,
            DIM, BLOCK_DIM, PRECISE, MASKED, PRECISION,
        )  # fmt: skip


@triton.jit
def add_messages(
    sums, raw, high, low, score_scale, message, logarithm, PRECISE: tl.constexpr
):  # fmt: skip
    """Adds the log messages of a tile ``[keys, rows]`` to partial sums ``[keys, columns]``; if PRECISE is 0 over their slope l0."""
    a = tl.exp2(relative(raw, high[None, :], low[None, :], score_scale, PRECISE))
    if PRECISE == 0:
        return sums + half_sums(half_log2(a.to(tl.float16), logarithm))
    elif PRECISE == 1:
        return sums + sums_of_logarithms(1.0 - message[0] * a)
    else:
        return sums + tl.sum(log2_message(a, message, PRECISE), 1)[:, None]


@triton.jit
def load_sender_lse(
    lse_base, low_plane, mask_base, start, tokens,
    ROWS: tl.constexpr, TAIL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Both parts of the rows' log-sum-exp; plus infinity for padding. After the last tile the values are unused."""
    if not TAIL:
        start = tl.minimum(start, tokens - ROWS)
    rows, left = tl.arange(0, ROWS), tokens - start  # positions in the tile: offsets known to the compiler
    high, low = load_lse(lse_base + start, low_plane, rows, left, PRECISE, TAIL)
    if MASKED:
        high = tl.where(real_tokens(mask_base + start, rows, left, MASKED), high, float("inf"))
    return high, low


@triton.jit
def store_message_sums(base, keys, tokens, mask_base, sums, unit, MASKED: tl.constexpr):
    """Stores summed log messages times ``unit``; minus infinity for padding keys. Returns the largest."""
    message_sums = tl.sum(sums, 1) * unit
    message_sums = tl.where(real_tokens(mask_base, keys, tokens, MASKED), message_sums, float("-inf"))
    tl.store(base + keys, message_sums, mask=keys < tokens)
    return tl.max(message_sums, 0)


@triton.jit
def column_messages(
    q_ptr, k_ptr, mask_ptr, cu_ptr, senders_ptr, lse_ptr, strength_ptr, message_sums_ptr, peak_ptr, q_map,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, group, length, blocks, low_plane, score_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, MAPPED: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Sum over rows of base-2 log messages about each key, and the largest sum of each block of keys.

    STRIDE above 1: of the sending rows, times ``rows_per_sender``.
    """
    pid = tl.program_id(0)
    block, batch, head, first, tokens = locate(pid, blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        tl.store(peak_ptr + pid, float("-inf"))
        return
    sender_list, count, rows_per_sender = sending_rows(senders_ptr, batch, tokens, length, STRIDE, MASKED)
    PADDED: tl.constexpr = MASKED and STRIDE == 1  # padding is no sending row
    SPLIT: tl.constexpr = KEYS == 128
    PART: tl.constexpr = 64 if SPLIT else KEYS
    begin = block * KEYS
    keys = begin + tl.arange(0, PART)
    queries = states_of(q_map, q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    logarithm = pair_logarithm(message)
    COLUMNS: tl.constexpr = 1 if PRECISE == 2 else 8
    unit = logarithm[0] if PRECISE == 0 else 1.0
    if STRIDE > 1:
        unit *= rows_per_sender
    k = load_rows(k_base, begin, tokens, k_row, PART, DIM, BLOCK_DIM, True)
    sums = tl.zeros([PART, COLUMNS], tl.float32)
    if SPLIT:
        k_2 = load_rows(k_base, begin + PART, tokens, k_row, PART, DIM, BLOCK_DIM, True)
        sums_2 = tl.zeros([PART, COLUMNS], tl.float32)
    # A tile's log-sum-exp is prefetched before its product.
    high, low = load_sender_lse(
        lse_ptr + row_base, low_plane, mask_base, 0, count, ROWS, TAIL, PRECISE, PADDED
    )
    for start in tl.range(0, count, ROWS):
        if STRIDE == 1:
            q = fetch_tile(queries, start, tokens, ROWS, DIM, BLOCK_DIM, TAIL, MAPPED)
        else:
            q = load_senders(
                queries[1], sender_list, start, count, q_row, ROWS, DIM, BLOCK_DIM, TAIL, STRIDE, MASKED
            )
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if SPLIT:
            raw_2 = tl.dot(k_2, tl.trans(q), input_precision=PRECISION)
        sums = add_messages(sums, raw, high, low, score_scale, message, logarithm, PRECISE)
        if SPLIT:
            sums_2 = add_messages(sums_2, raw_2, high, low, score_scale, message, logarithm, PRECISE)
        high, low = load_sender_lse(
            lse_ptr + row_base, low_plane, mask_base, start + ROWS, count, ROWS, TAIL, PRECISE, PADDED
        )
    peak = store_message_sums(message_sums_ptr + row_base, keys, tokens, mask_base, sums, unit, MASKED)
    if SPLIT:
        keys += PART
        peak_2 = store_message_sums(
            message_sums_ptr + row_base, keys, tokens, mask_base, sums_2, unit, MASKED
        )
        peak = tl.maximum(peak, peak_2)
    tl.store(peak_ptr + pid, peak)


@triton.jit
def key_weights(
    message_sums_ptr, peak_ptr, weight_ptr, cu_ptr, heads, length, blocks,
    KEYS: tl.constexpr, BLOCKS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Subtracts the head's largest from the log-message sums c, in place, and stores the keys' weights 2^c, 0 for padding."""
    pid = tl.program_id(0)
    block, batch, head, first, tokens = locate(pid, blocks, heads, length, cu_ptr, PACKED)
    places = tl.arange(0, BLOCKS)
    peaks = tl.load(peak_ptr + pid // blocks * blocks + places, mask=places < blocks, other=float("-inf"))
    peak = tl.max(peaks, 0)
    keys = block * KEYS + tl.arange(0, KEYS)
    base = head_base(0, batch, head, first, heads, length)
    message_sums = tl.load(message_sums_ptr + base + keys, mask=keys < tokens, other=float("-inf"))
    message_sums -= finite(peak)
    tl.store(message_sums_ptr + base + keys, message_sums, mask=keys < tokens)
    tl.store(weight_ptr + base + keys, tl.exp2(message_sums), mask=keys < tokens)

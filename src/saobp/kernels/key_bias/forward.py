# mypy: ignore-errors
"""Key bias from a part of the rows, forward: the third sweep, after the two of ``bidirectional.sums``.

softmax(s + c) is plain attention with a bias per key, so the output needs no log-sum-exp of the prior, and the first two
sweeps take the sending rows alone. No maximum of a row is subtracted, since bfloat16 has the range of float32: the bias is
relative to the head's largest (``peak``), and a block of rows whose weights leave that range nevertheless is computed again by
online softmax. ANCHORED, for other types: the largest biased score of the row's first tile is subtracted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.forward import add_row_sums
from saobp.kernels.bidirectional.sums import write_lse
from saobp.kernels.library.arithmetic import (
    drop,
    finite,
    head_dropout,
    load_rows,
    load_vector,
    raise_maximum,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate, states_base


@triton.jit
def first_reference(q, k, bias, score_scale, PRECISION: tl.constexpr, ANCHORED: tl.constexpr):
    """Largest biased score of each row of a tile; 0 for a row that sees none of its keys, or if not ANCHORED."""
    if ANCHORED:
        top = tl.max(tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale + bias[None, :], 1)
        return finite(top)
    else:
        return tl.zeros([q.shape[0]], tl.float32)


@triton.jit
def add_tile(
    out, totals, raw, v, bias, reference, ones, dropout, rows, keys, score_scale,
    PRECISE: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """Adds a tile of keys to the output and to the sums of weights ``totals`` ``[rows, 16]`` of some rows, neither normalised."""
    scores = raw * score_scale + bias[None, :]
    if ANCHORED:
        scores -= reference[:, None]
    weights = tl.exp2(scores).to(v.dtype)
    totals = add_row_sums(totals, weights, ones, PRECISE)
    weights = drop(weights, dropout, rows[:, None], keys[None, :], DROPS)
    return tl.dot(weights, v, out, input_precision=PRECISION), totals


@triton.jit
def online_softmax(
    q, k_base, v_base, message_sums_base, peak, dropout, rows, tokens, k_row, v_row, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output, sum of weights and running maximum of some rows by online softmax, in narrow tiles."""
    KEYS: tl.constexpr = 16
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    reference = tl.zeros([q.shape[0]], tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    out = tl.zeros([q.shape[0], BLOCK_DIM], tl.float32)
    for start in tl.range(0, tokens, KEYS, num_stages=1):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
        v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
        bias = load_vector(message_sums_base, keys, tokens, float("-inf"), True) - peak
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale + bias[None, :]
        top, reference, shrink = raise_maximum(top, scores)
        weights = tl.exp2(scores - reference[:, None]).to(v.dtype)
        total = total * shrink + tl.sum(weights.to(tl.float32), 1)
        weights = drop(weights, dropout, rows[:, None], keys[None, :], DROPS)
        out = tl.dot(weights, v, out * shrink[:, None], input_precision=PRECISION)
    return out, total, reference


@triton.jit
def finish_rows(
    out, totals, reference, q, k_base, v_base, out_ptr, rest_ptr, out_offset, message_sums_base, belief_base,
    low_plane, peak, dropout, begin, tokens, k_row, v_row, o_row, score_scale, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PRECISE: tl.constexpr, DROPS: tl.constexpr, SAVES: tl.constexpr,
    PRECISION: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """Normalises and stores some rows of the output; if SAVES also its rounding error (``rest``) and log2 of the normalisers
    (``belief``).
    """
    rows = begin + tl.arange(0, out.shape[0])
    total = tl.max(totals, 1)
    # ANCHORED: the largest weight of the first tile is 1, if one of its keys is real.
    if (tl.max(total) > 1e37) | (tl.min(total) < (0.5 if ANCHORED else 1e-28)):
        out, total, reference = online_softmax(
            q, k_base, v_base, message_sums_base, peak, dropout, rows, tokens, k_row, v_row, score_scale,
            DIM, BLOCK_DIM, DROPS, PRECISION,
        )  # fmt: skip
    out *= tl.where(total > 0, keep_scale / total, 0.0)[:, None]
    store_rows(out_ptr + out_offset, begin, tokens, o_row, out, out.shape[0], DIM, BLOCK_DIM)
    if SAVES:
        KIND: tl.constexpr = out_ptr.dtype.element_ty
        if PRECISE != 2:
            rest = out - out.to(KIND).to(tl.float32)
            store_rows(rest_ptr + out_offset, begin, tokens, o_row, rest, out.shape[0], DIM, BLOCK_DIM)
        write_lse(belief_base, low_plane, rows, tokens, reference + peak, total, PRECISE)


@triton.jit
def biased_output(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_ptr, seed_ptr, message_sums_ptr, peak_ptr, rest_ptr, belief_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, length, blocks, peaks, low_plane, score_scale, drop_threshold, keep_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr, SAVES: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr, ANCHORED: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """Output of a block of rows, if SPLIT in two halves. ``message_sums`` is minus infinity for padding keys.

    ``peaks`` is the number of blocks of keys, with a largest sum each; PEAKS is it as a power of two.
    """
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        return
    PART: tl.constexpr = 64 if SPLIT else ROWS
    begin = block * ROWS
    rows = begin + tl.arange(0, PART)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    out_offset = states_base(0, batch, head, first, o_batch, o_head, o_row)
    row_base = head_base(0, batch, head, first, heads, length)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    places = tl.arange(0, PEAKS)
    peak_base = peak_ptr + tl.program_id(0) // blocks * peaks
    peak = finite(tl.max(tl.load(peak_base + places, mask=places < peaks, other=float("-inf")), 0))
    ones = tl.full([KEYS, 16], 1.0, v_ptr.dtype.element_ty)
    k = load_rows(k_base, 0, tokens if ANCHORED else 0, k_row, KEYS, DIM, BLOCK_DIM, True)
    bias = load_vector(message_sums_ptr + row_base, tl.arange(0, KEYS), tokens, float("-inf"), True) - peak
    q = load_rows(q_base, begin, tokens, q_row, PART, DIM, BLOCK_DIM, True)
    reference = first_reference(q, k, bias, score_scale, PRECISION, ANCHORED)
    out = tl.zeros([PART, BLOCK_DIM], tl.float32)
    totals = tl.zeros([PART, 16], tl.float32)
    if SPLIT:
        q_2 = load_rows(q_base, begin + PART, tokens, q_row, PART, DIM, BLOCK_DIM, True)
        reference_2 = first_reference(q_2, k, bias, score_scale, PRECISION, ANCHORED)
        out_2 = tl.zeros([PART, BLOCK_DIM], tl.float32)
        totals_2 = tl.zeros([PART, 16], tl.float32)
    for start in tl.range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_base, start, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        v = load_rows(v_base, start, tokens, v_row, KEYS, DIM, BLOCK_DIM, TAIL)
        bias = load_vector(message_sums_ptr + row_base, keys, tokens, float("-inf"), TAIL) - peak
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SPLIT:
            raw_2 = tl.dot(q_2, tl.trans(k), input_precision=PRECISION)
        out, totals = add_tile(
            out, totals, raw, v, bias, reference, ones, dropout, rows, keys, score_scale,
            PRECISE, DROPS, PRECISION, ANCHORED,
        )  # fmt: skip
        if SPLIT:
            out_2, totals_2 = add_tile(
                out_2, totals_2, raw_2, v, bias, reference_2, ones, dropout, rows + PART, keys, score_scale,
                PRECISE, DROPS, PRECISION, ANCHORED,
            )  # fmt: skip
    finish_rows(
        out, totals, reference, q, k_base, v_base, out_ptr, rest_ptr, out_offset, message_sums_ptr + row_base,
        belief_ptr + row_base, low_plane, peak, dropout, begin, tokens, k_row, v_row, o_row, score_scale,
        keep_scale, DIM, BLOCK_DIM, PRECISE, DROPS, SAVES, PRECISION, ANCHORED,
    )  # fmt: skip
    if SPLIT:
        finish_rows(
            out_2, totals_2, reference_2, q_2, k_base, v_base, out_ptr, rest_ptr, out_offset,
            message_sums_ptr + row_base, belief_ptr + row_base, low_plane, peak, dropout, begin + PART, tokens, k_row, v_row,
            o_row, score_scale, keep_scale, DIM, BLOCK_DIM, PRECISE, DROPS, SAVES, PRECISION, ANCHORED,
        )  # fmt: skip

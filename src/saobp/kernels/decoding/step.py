# mypy: ignore-errors
"""One new row of strict causal attention against cached keys, values and messages: two launches.

With c_k the sum of log messages about key k before the row, its refined row is softmax(s + c), and the row's own prior
a = softmax(s) then adds log(1 - gamma a_k) to c_k.

1. ``attend_part``: a part of the keys of one key head, for all query heads that share it. The output of the part, its
   normalisers, and the prior's numerators, in half precision relative to the largest of their tile of keys.
2. ``finish_row``: the output from all parts, and the new sums of messages, once the prior's normaliser is known. On Hopper its
   programs begin while the last of ``attend_part`` run, load the sums so far, and wait for the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import INTERPRETED, finite, head_message, load_rows, raise_maximum

LOG2_E = tl.constexpr(1.4426950408889634)
VECTOR = tl.constexpr(8)
"""Numbers that a thread of ``finish_row`` loads at once."""
SEEN_BY_PADDING = tl.constexpr(2)
"""Entry of the mask as in ``saobp.transformers.masks``."""


@triton.jit
def add_sum(top, total, other_top, other_total):
    """Maximum and sum of exponentials of two sets, from each one's (online softmax)."""
    raised = tl.maximum(top, other_top)
    anchor = finite(raised)
    return raised, total * tl.exp2(top - anchor) + other_total * tl.exp2(other_top - anchor)


@triton.jit(
    do_not_specialize=[
        "q_batch", "q_head", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row", "mask_batch", "heads", "keys",
        "past_keys", "past_line", "tiles", "parts", "part_tiles",
    ]
)  # fmt: skip
def attend_part(
    q_ptr, k_ptr, v_ptr, mask_ptr, past_ptr, part_out_ptr, part_sums_ptr, tile_tops_ptr, numerators_ptr,
    q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch,
    heads, keys, past_keys, past_line, tiles, parts, part_tiles, score_scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over ``part_tiles`` tiles of keys of one key head, for the GROUP query heads that share it.

    ``past`` holds sums of messages about the first ``past_keys`` keys. Strides of states are divided by 8, and ``past_line``,
    a row of ``past``, by 16, so that the compiler knows their alignment.
    """
    part = tl.program_id(0) % parts
    line = tl.program_id(0) // parts
    key_heads = heads // GROUP
    batch, key_head = (line // key_heads).to(tl.int64), line % key_heads
    local = tl.arange(0, ROWS)
    inside = local < GROUP
    head = key_head * GROUP + local
    rows = batch * heads + head
    dims = tl.arange(0, BLOCK_DIM)
    k_base = k_ptr + (batch * k_batch + key_head * k_head) * 8
    v_base = v_ptr + (batch * v_batch + key_head * v_head) * 8
    q_places = (batch * q_batch + head * q_head) * 8
    q = tl.load(
        q_ptr + q_places[:, None] + dims[None, :], mask=inside[:, None] & (dims < DIM)[None, :], other=0.0
    )

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    prior_top, prior_total = top, total
    out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for tile in tl.range(part * part_tiles, min(part * part_tiles + part_tiles, tiles)):
        begin = tile * KEYS
        places = begin + tl.arange(0, KEYS)
        k = load_rows(k_base, begin, keys, k_row * 8, KEYS, DIM, BLOCK_DIM, True)
        v = load_rows(v_base, begin, keys, v_row * 8, KEYS, DIM, BLOCK_DIM, True)
        past = tl.load(
            past_ptr + (rows * past_line * 16)[:, None] + places[None, :],
            mask=inside[:, None] & (places < past_keys)[None, :],
            other=0.0,
        )
        seen = places < keys
        sends = seen
        if MASKED:
            entry = tl.load(mask_ptr + batch * mask_batch + places, mask=places < keys, other=0)
            seen, sends = entry != 0, entry != SEEN_BY_PADDING
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        tile_top = tl.max(scores, 1)
        prior = tl.exp2(scores - finite(tile_top)[:, None])
        prior_top, prior_total = add_sum(prior_top, prior_total, tile_top, tl.sum(prior, 1))
        tl.store(tile_tops_ptr + rows * tiles + tile, tile_top, mask=inside)
        if MASKED:
            prior = tl.where(sends[None, :], prior, 0.0)
        numerator_places = (rows * tiles * KEYS)[:, None] + places[None, :]
        tl.store(
            numerators_ptr + numerator_places, prior.to(numerators_ptr.dtype.element_ty), mask=inside[:, None]
        )
        beliefs = scores + past * LOG2_E
        top, anchor, shrink = raise_maximum(top, beliefs)
        refined = tl.exp2(beliefs - anchor[:, None])
        total = total * shrink + tl.sum(refined, 1)
        out = tl.dot(refined.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    place = rows * parts + part
    tl.store(part_sums_ptr + place * 4, top, mask=inside)
    tl.store(part_sums_ptr + place * 4 + 1, total, mask=inside)
    tl.store(part_sums_ptr + place * 4 + 2, prior_top, mask=inside)
    tl.store(part_sums_ptr + place * 4 + 3, prior_total, mask=inside)
    tl.store(part_out_ptr + (place * BLOCK_DIM)[:, None] + dims[None, :], out, mask=inside[:, None])


@triton.jit
def log2_of_rest(x):
    """log2(1 - x) in all digits of float32, for x < 1: as ``log2_message`` if PRECISE is 2, in fewer instructions.

    1 - x = 2^n (1 + f) with 1 + f from 0.71 to 1.41. What rounding 1 - x lost is added to f. The polynomial was fitted for equal
    relative errors, 1.3e-7 at most.
    """
    rest = 1.0 - x
    bits = rest.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & -0x800000
    lost = ((1.0 - rest) - x) * (0x3F800000 - exponent).to(tl.float32, bitcast=True)
    f = ((bits - exponent).to(tl.float32, bitcast=True) - 1.0) + lost
    p = f * 0.10289612412452698 - 0.11656051874160767
    p = p * f + 0.14039498567581177
    p = p * f - 0.18651510775089264
    p = p * f + 0.21078726649284363
    p = p * f - 0.24016635119915009
    p = p * f + 0.28823837637901306
    p = p * f - 0.36067667603492737
    p = p * f + 0.48090440034866333
    p = p * f - 0.7213475108146667
    return exponent.to(tl.float32) * 1.1920928955078125e-07 + (f * (f * p) + f * 1.44269502162933349609)


@triton.jit
def _load_sums(part_sums_ptr, row, parts, PARTS: tl.constexpr):
    """Of each part of a row's keys: the largest logarithm, and the sum relative to it."""
    part = tl.arange(0, PARTS)
    sums = part_sums_ptr + (row * parts + part) * 4
    top = tl.load(sums, mask=part < parts, other=float("-inf"))
    return top, tl.load(sums + 1, mask=part < parts, other=0.0)


@triton.jit
def _add_parts(
    part_out_ptr, part_sums_ptr, out_ptr, row, parts, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Output of a row from those of its parts of the keys."""
    part = tl.arange(0, PARTS)
    top, total = _load_sums(part_sums_ptr, row, parts, PARTS)
    weight = tl.exp2(top - finite(tl.max(top, 0)))
    total = tl.sum(total * weight, 0)
    dims = tl.arange(0, BLOCK_DIM)
    outs = tl.load(
        part_out_ptr + ((row * parts + part) * BLOCK_DIM)[:, None] + dims[None, :],
        mask=(part < parts)[:, None],
        other=0.0,
    )
    out = tl.sum(outs * weight[:, None], 0) * tl.where(total > 0, 1.0 / total, 0.0)
    tl.store(out_ptr + row * DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < DIM)


@triton.jit
def _wait_for_parts(PDL: tl.constexpr):
    """PDL: this kernel began before the one that computes the parts ended."""
    if PDL and not INTERPRETED:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], tl.int32, False, 1)


@triton.jit(
    do_not_specialize=["heads", "keys", "past_keys", "past_line", "new_line", "tiles", "parts", "blocks"]
)
def finish_row(
    past_ptr, strength_ptr, part_out_ptr, part_sums_ptr, tile_tops_ptr, numerators_ptr, totals_ptr, out_ptr,
    heads, keys, past_keys, past_line, new_line, tiles, parts, blocks, sign,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The first program of a row adds up its output, the ``blocks`` others add messages about SIZE keys each."""
    block = tl.program_id(0) % (blocks + 1)
    row = (tl.program_id(0) // (blocks + 1)).to(tl.int64)
    if block == 0:
        _wait_for_parts(PDL)
        _add_parts(part_out_ptr, part_sums_ptr, out_ptr, row, parts, DIM, BLOCK_DIM, PARTS)
    else:
        head = (row % heads).to(tl.int32)
        gamma = head_message(strength_ptr, head, sign, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)[0]
        tile = (block - 1) * (SIZE // KEYS) + tl.arange(0, SIZE // KEYS)
        places = tile[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
        # Masks of whole vectors: rows of sums are as long as a multiple of them.
        past = tl.load(
            past_ptr + row * past_line * 16 + places,
            mask=places // VECTOR < tl.cdiv(past_keys, VECTOR),
            other=0.0,
        )
        past = tl.where(places < past_keys, past, 0.0)
        _wait_for_parts(PDL)
        top, total = _load_sums(part_sums_ptr + 2, row, parts, PARTS)
        tile_top = tl.load(tile_tops_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        numerator = tl.load(
            numerators_ptr + row * tiles * KEYS + places,
            mask=(tile < tiles)[:, None],
            other=0.0,
            eviction_policy="evict_first",
        )
        anchor = finite(tl.max(top, 0))
        lse = anchor + tl.log2(tl.maximum(tl.sum(total * tl.exp2(top - anchor), 0), 1e-37))
        a = numerator.to(tl.float32) * tl.exp2(tile_top - lse)[:, None]
        sent = log2_of_rest(gamma * a) * (1.0 / LOG2_E)
        tl.store(
            totals_ptr + row * new_line * 16 + places,
            past + sent,
            mask=places // VECTOR < tl.cdiv(keys, VECTOR),
        )

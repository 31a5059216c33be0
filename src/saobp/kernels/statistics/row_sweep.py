# mypy: ignore-errors
"""One sweep over the keys for a block of query rows: largest logit, entropy, and the weight of a text's first keys.

Scores are in base-2 logarithms. A row keeps its maximum m, the sum l of p = 2^(x - m), the sum of p (x - m), from
which the entropy follows without cancellation, and the sum of p times the norms of the values, all four for each of the
LANES threads that share it, so that threads exchange nothing before the end. The weights of the first keys need the final
normaliser: they are computed after the sweep.

Under a mask of single entries a row has one lane: the compiler would lay out a tile as the mask is loaded, with a lane's keys
in threads 1, 8 and 16 apart, which Triton 3.6 and 3.7 reduce wrongly (mended by triton-lang/triton#9219).
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(4)
"""Threads that share a row of a product of tensor cores, pairs of neighbouring columns in turn."""
LOWEST = tl.constexpr(-1e38)
"""Maximum of a lane that has seen no key: finite, so that differences need no checks."""


@triton.jit
def row_sweep(
    query_ptr, key_ptr, norms_ptr, real_keys_ptr, real_rows_ptr, mask_ptr, starts_ptr, ends_ptr, out_ptr, key_map,
    query_batch, query_head, query_row, key_batch, key_head, key_row, norm_batch, norm_head, norm_row,
    real_keys_batch, real_rows_batch, mask_batch, mask_head, mask_row, starts_batch,
    heads, group, section, queries, keys, offset, window, score_scale, lowest_bias,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr, MASK: tl.constexpr, STARTS: tl.constexpr,
    WEIGHTED: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Six numbers for each block of ROWS rows: maximum, sums of entropy, first, first-k and weighted share, and rows.

    Row i is at position offset + i. PADDED: real keys and rows are marked. MASK: 0 none, 1 one byte per entry, 2 a bias,
    hidden at ``lowest_bias`` and below. STARTS: 0 a text starts at key 0, 1 at a key per text, 2 start and end per row.
    """
    blocks = tl.cdiv(queries, ROWS)
    lines = tl.num_programs(0) // blocks
    # The longest causal rows of all heads of a section first: its keys stay in the L2 cache.
    begun = tl.program_id(0) // (section * blocks) * section
    place, width = tl.program_id(0) - begun * blocks, tl.minimum(section, lines - begun)
    block, line = blocks - 1 - place // width, begun + place % width
    head, batch = line % heads, (line // heads).to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    dims = tl.arange(0, WIDTH)
    query_base = query_ptr + batch * query_batch + head.to(tl.int64) * query_head
    key_base = key_ptr + batch * key_batch + (head // group).to(tl.int64) * key_head
    norm_base = norms_ptr + batch * norm_batch + (head // group).to(tl.int64) * norm_head
    mask_base = mask_ptr + batch * mask_batch + head.to(tl.int64) * mask_head + rows.to(tl.int64) * mask_row
    real_base = real_keys_ptr + batch * real_keys_batch
    query = tl.load(
        query_base + rows.to(tl.int64)[:, None] * query_row + dims[None, :],
        mask=inside[:, None] & (dims < DIM)[None, :], other=0.0,
    )  # fmt: skip

    lowest = offset + block * ROWS
    low, high = 0, keys
    start = tl.zeros([ROWS], tl.int32)
    end = tl.zeros([ROWS], tl.int32) + keys
    if STARTS == 1:
        start += tl.load(starts_ptr + batch * starts_batch)
        low = tl.max(start, 0)
    if STARTS == 2:
        start = tl.load(starts_ptr + batch * starts_batch + rows, mask=inside, other=2147483647)
        end = tl.load(ends_ptr + batch * starts_batch + rows, mask=inside, other=0)
        low, high = tl.min(start, 0), tl.max(end, 0)
    if CAUSAL:
        high = tl.minimum(high, lowest + ROWS)
    elif WINDOW:
        high = tl.minimum(high, lowest + ROWS - 1 + window)
    if WINDOW:
        low = tl.maximum(low, lowest - window + 1)
    low = low // KEYS * KEYS
    high = tl.minimum(high, keys)

    source = key_map, batch.to(tl.int32), head // group
    bases = key_base, norm_base, real_base, mask_base
    limits = rows + offset, inside, start, end, keys, window, score_scale, lowest_bias
    nothing = tl.zeros([ROWS, 1 if MASK > 0 else LANES], tl.float32)
    state = nothing + LOWEST, nothing, nothing, nothing
    if PADDED or MASK > 0 or STARTS > 0:
        state = _tiles(
            state, query, source, bases, limits, key_row, norm_row, low, high, DIM, WIDTH, KEYS, CAUSAL, WINDOW, PADDED, MASK, STARTS,
            WEIGHTED, MAPPED, True,
        )  # fmt: skip
    else:
        # Tiles that every row of the block sees as a whole lie between two stretches that need a mask.
        full_low, full_high = low, keys // KEYS * KEYS
        if CAUSAL:
            full_high = (lowest + 1) // KEYS * KEYS
        elif WINDOW:
            full_high = tl.minimum(full_high, (lowest + window) // KEYS * KEYS)
        if WINDOW:
            full_low = tl.maximum(low, tl.cdiv(tl.maximum(lowest + ROWS - window, 0), KEYS) * KEYS)
            full_low = tl.minimum(full_low, tl.cdiv(high, KEYS) * KEYS)
        full_high = tl.maximum(tl.minimum(full_high, high // KEYS * KEYS), full_low)
        if WINDOW:
            state = _tiles(
                state, query, source, bases, limits, key_row, norm_row, low, full_low, DIM, WIDTH, KEYS, CAUSAL, WINDOW, PADDED, MASK,
                STARTS, WEIGHTED, MAPPED, True,
            )  # fmt: skip
        state = _tiles(
            state, query, source, bases, limits, key_row, norm_row, full_low, full_high, DIM, WIDTH, KEYS, CAUSAL, WINDOW, PADDED, MASK,
            STARTS, WEIGHTED, MAPPED, False,
        )  # fmt: skip
        state = _tiles(
            state, query, source, bases, limits, key_row, norm_row, full_high, high, DIM, WIDTH, KEYS, CAUSAL, WINDOW, PADDED, MASK,
            STARTS, WEIGHTED, MAPPED, True,
        )  # fmt: skip

    tops, totals, spreads, weights = state
    top = tl.max(tops, 1)
    fallen = tops - top[:, None]
    kept = tl.exp2(fallen)
    total, weighted = tl.sum(kept * totals, 1), tl.sum(kept * weights, 1)
    spread = tl.sum(kept * (spreads + fallen * totals), 1)
    counted = inside & (total != 0.0)
    if PADDED:
        real = tl.load(real_rows_ptr + batch * real_rows_batch + rows, mask=inside, other=0)
        counted &= real != 0
    total = tl.where(counted, total, 1.0)
    entropy = 0.6931471805599453 * (tl.log2(total) - spread / total)
    normaliser = tl.where(counted, top, 0.0) + tl.log2(total)
    first = tl.zeros([ROWS], tl.float32)
    several = tl.zeros([ROWS], tl.float32)
    share = tl.zeros([ROWS], tl.float32)
    for place in tl.static_range(FIRST):
        at = start + place
        seen = _seen(at, bases, limits, CAUSAL, WINDOW, PADDED, MASK, STARTS) & counted
        states = tl.load(
            key_base + at.to(tl.int64)[:, None] * key_row + dims[None, :],
            mask=seen[:, None] & (dims < DIM)[None, :], other=0.0,
        )  # fmt: skip
        score = tl.sum(query.to(tl.float32) * states.to(tl.float32), 1) * score_scale
        if MASK == 2:
            score += tl.load(mask_base + at, mask=seen, other=0.0).to(tl.float32) * 1.4426950408889634
        weight = tl.where(seen, tl.minimum(tl.exp2(score - normaliser), 1.0), 0.0)
        several += weight
        if place == 0:
            first = weight
            if WEIGHTED:
                norm = tl.load(norm_base + at * norm_row, mask=seen, other=0.0)
                share = tl.where(
                    weighted > 0.0, weight * norm * total / tl.where(weighted > 0.0, weighted, 1.0), 0.0
                )

    out = out_ptr + ((batch * heads + head) * blocks + block) * 6
    tl.store(out, tl.max(tl.where(counted, top, float("-inf")), 0) * 0.6931471805599453)
    tl.store(out + 1, tl.sum(tl.where(counted, entropy, 0.0), 0))
    tl.store(out + 2, tl.sum(first, 0))
    tl.store(out + 3, tl.sum(tl.minimum(several, 1.0), 0))
    tl.store(out + 4, tl.sum(tl.minimum(share, 1.0), 0))
    tl.store(out + 5, tl.sum(counted.to(tl.float32), 0))


@triton.jit
def _tiles(
    state, query, source, bases, limits, key_row, norm_row, begin, stop, DIM: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr, MASK: tl.constexpr,
    STARTS: tl.constexpr, WEIGHTED: tl.constexpr, MAPPED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds the tiles of keys from ``begin`` up to ``stop``; those of an EDGE hold entries that are not seen."""
    top, total, spread, weighted = state
    key_map, batch, key_head = source
    key_base, norm_base, real_base, mask_base = bases
    positions, inside, start, end, keys, window, score_scale, lowest_bias = limits
    dims = tl.arange(0, WIDTH)
    for tile in range(begin, stop, KEYS):
        columns = tile + tl.arange(0, KEYS)
        places = columns.to(tl.int64)[None, :] * key_row + dims[:, None]
        if MAPPED:
            states = tl.trans(tl.reshape(key_map.load([batch, key_head, tile, 0]), [KEYS, WIDTH]))
        elif EDGE:
            states = tl.load(
                key_base + places, mask=(columns < keys)[None, :] & (dims < DIM)[:, None], other=0.0
            )
        elif DIM == WIDTH:
            states = tl.load(key_base + places)
        else:
            states = tl.load(key_base + places, mask=(dims < DIM)[:, None], other=0.0)
        scores = tl.dot(query, states, input_precision="ieee")
        if EDGE:
            seen = _seen(columns[None, :], bases, limits, CAUSAL, WINDOW, PADDED, MASK, STARTS)
            scores *= score_scale
            if MASK == 2:
                bias = tl.load(mask_base[:, None] + columns[None, :], mask=seen, other=0.0)
                scores += bias.to(tl.float32) * 1.4426950408889634
            scores = _by_lane(tl.where(seen, scores, float("-inf")), MASK)
            higher = tl.maximum(top, tl.max(scores, 2))
            below = scores - higher[:, :, None]
            weights = tl.exp2(below)
            below = tl.where(scores == float("-inf"), 0.0, below)
        else:
            scores = _by_lane(scores, MASK)
            higher = tl.maximum(top, tl.max(scores, 2) * score_scale)
            below = scores * score_scale - higher[:, :, None]
            weights = tl.exp2(below)
        fallen = top - higher
        kept = tl.exp2(fallen)
        spread = kept * (spread + fallen * total) + tl.sum(weights * below, 2)
        total = kept * total + tl.sum(weights, 2)
        if WEIGHTED:
            if EDGE:
                norms = tl.load(norm_base + columns * norm_row, mask=columns < keys, other=0.0)
            else:
                norms = tl.load(norm_base + columns * norm_row)
            norms = _by_lane(norms[None, :], MASK)
            weighted = kept * weighted + tl.sum(weights * norms, 2)
        top = higher
    return top, total, spread, weighted


@triton.jit
def _by_lane(tile, MASK: tl.constexpr):
    """A tile ``[rows, keys]`` as ``[rows, lanes, keys / lanes]``: a thread has the scores of one lane of a row."""
    ROWS: tl.constexpr = tile.shape[0]
    KEYS: tl.constexpr = tile.shape[1]
    if MASK > 0:
        return tile[:, None, :]
    else:
        pairs = tl.reshape(tile, (ROWS, KEYS // (2 * LANES), LANES, 2))
        return tl.reshape(tl.permute(pairs, (0, 2, 1, 3)), (ROWS, LANES, KEYS // LANES))


@triton.jit
def _seen(
    columns, bases, limits, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr, MASK: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    """Whether rows see the given keys: one key for each row ``[ROWS]``, or a tile's keys ``[1, KEYS]`` for all."""
    key_base, norm_base, real_base, mask_base = bases
    positions, inside, start, end, keys, window, score_scale, lowest_bias = limits
    if len(columns.shape) == 2:
        positions, inside, start, end = positions[:, None], inside[:, None], start[:, None], end[:, None]
        mask_base = mask_base[:, None]
    seen = inside & (columns < keys)
    if CAUSAL:
        seen &= columns <= positions
    if WINDOW:
        seen &= positions - columns < window
        if not CAUSAL:
            seen &= columns - positions < window
    if STARTS == 2:
        seen &= (columns >= start) & (columns < end)
    if PADDED:
        seen &= tl.load(real_base + columns, mask=columns < keys, other=0) != 0
    if MASK == 1:
        seen &= tl.load(mask_base + columns, mask=seen, other=0) != 0
    if MASK == 2:
        seen &= tl.load(mask_base + columns, mask=seen, other=float("-inf")).to(tl.float32) > lowest_bias
    return seen

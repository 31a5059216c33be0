# mypy: ignore-errors
"""Strict causal attention of 129 to 1024 tokens on Hopper: a program takes a head's blocks of rows in turn, forward in one launch.

The three sweeps of ``causal/forward.py`` in one. Of each block of rows, first the log-sum-exp. Then scores anew, in tiles
``[keys, rows]`` as in ``causal/weak_forward.py``: messages, the first operand of the product with a strict triangle of ones,
stay in registers, and a warp has all rows of its keys, so it carries their log-message sums to the next block by itself.
Refined weights go through shared memory, to be the first operand of the product with values.

TMA brings keys and values through a ring of tiles, in the order in which they are used: all keys of a
block, then keys and values by turns, then the next block's, or the next head's. Refined weights are relative to the
row's log-sum-exp; if CAREFUL, to the largest so far, for heads with rows that would underflow, or messages that
raise beliefs.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from saobp.kernels.bidirectional.short_weak import real_or
from saobp.kernels.causal.short_forward import message_unit
from saobp.kernels.hopper.causal_tiles import (
    COLUMNS,
    dropped,
    messages_of,
    needs_care,
    rounded_weights,
    shown,
    store_lowest,
    store_past,
    store_rest,
    store_triangle,
    vector_layout,
)
from saobp.kernels.hopper.head_tiles import (
    add_row_sums,
    narrow_layout,
    new_barrier,
    place,
    product_layout,
    tile_layout,
)
from saobp.kernels.hopper.short_forward import WRITTEN
from saobp.kernels.hopper.tile_ring import DIM, KEYS, STAGES, announce, awaited, fetch_tile, tiles_seen
from saobp.kernels.hopper.whole_map import as_reference, rounded_powers
from saobp.kernels.library.arithmetic import _hardware_log2, head_message
from saobp.kernels.library.gluon_names import reinterpret, tma_load, tma_store


@gluon.jit
def refine_heads(
    first, step, count, used, started, pointers, maps, memory, sizes, numbers, strengths,
    ROWS: tl.constexpr, TAIL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    RECORDS: tl.constexpr, CAREFUL: tl.constexpr, RESTS: tl.constexpr,
):  # fmt: skip
    """Every ``step``-th of all heads from ``first`` on, ``count`` of them; returns the smallest normaliser.

    ``used`` and ``started``: how many tiles of the ring, and blocks of rows, there have been so far; returned too.
    """
    mask_ptr, seed_ptr, lse_ptr, strength_ptr, message_sums_ptr, belief_ptr, lowest_ptr, rest_ptr = pointers
    q_map, k_map, v_map, out_map = maps
    q_memory, ring, refined_memory, triangle, past, lse_memory, lowest_memory, q_ready, ready = memory
    heads, group, length, lowest_blocks = sizes
    score_scale, drop_threshold, keep_scale = numbers
    sign, r0, r1, r2, l0, l1, l2 = strengths
    WARPS: tl.constexpr = gl.num_warps()
    EACH: tl.constexpr = ROWS // KEYS
    Q_BYTES: tl.constexpr = 2 * ROWS * DIM
    KIND: tl.constexpr = q_map.dtype
    states: tl.constexpr = product_layout(KEYS, WARPS)  # of [rows, keys] and of the output
    turned: tl.constexpr = product_layout(ROWS, WARPS)  # of [keys, rows]
    by_row: tl.constexpr = gl.SliceLayout(1, states)
    narrow: tl.constexpr = narrow_layout(WARPS)
    plain: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = reinterpret(q_memory, KIND, [ROWS, DIM], tile_layout())
    # The output leaves through the shared memory of the weights.
    out_memory = reinterpret(refined_memory, KIND, [1, 1, ROWS, DIM], out_map.layout)
    out = reinterpret(refined_memory, KIND, [ROWS, DIM], tile_layout())
    tiles_from = (k_map, v_map, ring, ready)
    blocks, tiles = (length + ROWS - 1) // ROWS, (length + KEYS - 1) // KEYS

    batch, head, key_head = place(first, heads, group)
    lowest_of_all = gl.to_tensor(1.0)
    if count > 0:
        here = (batch, key_head, tiles_seen(0, tiles, EACH))
        mbarrier.expect(q_ready, Q_BYTES)
        for number in gl.static_range(STAGES):
            announce(number, number, STAGES, False, ready)
        tl.debug_barrier()
        tma_load(q_map, [batch, head, 0, 0], q_ready, q_memory)
        for number in gl.static_range(STAGES):
            fetch_tile(gl.to_tensor(number), number, here, here, False, tiles_from)
    for turn in range(count):
        batch, head, key_head = place(first + turn * step, heads, group)
        next_batch, next_head, next_key_head = place(first + (turn + 1) * step, heads, group)
        line = batch.to(gl.int64) * heads + head
        row_base = line * length
        mask_base = mask_ptr + batch.to(gl.int64) * length
        message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
        if PRECISE == 0:
            store_triangle(triangle, message_unit(message, PRECISE))
            fence_async_shared()
        for block in range(blocks):
            inside = block + 1 < blocks
            more = inside | (turn + 1 < count)
            seen = tiles_seen(block, tiles, EACH)
            end = 3 * seen
            next_block = gl.where(inside, block + 1, 0)
            here = (batch, key_head, seen)
            following = (
                gl.where(inside, batch, next_batch),
                gl.where(inside, key_head, next_key_head),
                tiles_seen(next_block, tiles, EACH),
            )
            rows = block * ROWS + gl.arange(0, ROWS, by_row)
            edge = block * EACH
            mbarrier.wait(q_ready, started & 1)
            started += 1

            top = gl.full([ROWS], float("-inf"), gl.float32, by_row)
            sums = gl.full([ROWS, COLUMNS], 0.0, gl.float32, narrow)
            for EDGE in gl.static_range(2):
                for tile in range(edge if EDGE else 0, seen if EDGE else edge):
                    stage = (used + tile) % STAGES
                    k = awaited(used + tile, ring, ready, KIND)
                    none = gl.full([ROWS, KEYS], 0.0, gl.float32, states)
                    raw = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
                    raw = warpgroup_mma_wait(0, deps=(raw,))
                    announce(tile + STAGES, stage, end, more, ready)
                    tl.debug_barrier()  # all warps have used the keys
                    fetch_tile(tile + STAGES, stage, here, following, more, tiles_from)
                    keys = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, states))
                    raw = shown(raw, keys[None, :], rows[:, None], mask_base, length, EDGE, MASKED)
                    raised = gl.maximum(top, gl.max(raw, 1) * score_scale)
                    high = as_reference(raised, MASKED)
                    shrink = gl.exp2(top - high)
                    top = raised
                    sums *= gl.convert_layout(shrink, gl.SliceLayout(1, narrow))[:, None]
                    sums = add_row_sums(rounded_powers(raw, score_scale, high[:, None], gl.float16), sums)
            total = gl.convert_layout(gl.max(sums, 1), by_row)
            lse = as_reference(top, MASKED) + _hardware_log2(total)
            if MASKED:
                lse = gl.where(total > 0, lse, float("inf"))
            if TAIL:
                lse = gl.where(rows < length, lse, float("inf"))
            gl.store(lse_ptr + row_base + rows, lse, mask=rows < length)
            lse_memory.store(lse)
            tma.store_wait(0)
            tl.debug_barrier()  # all rows are there, and the previous output has left

            top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, turned))
            sums = gl.full([ROWS, COLUMNS], 0.0, gl.float32, narrow)
            product = warpgroup_mma_init(gl.full([ROWS, DIM], 0.0, gl.float32, states))
            weights = gl.full([ROWS, KEYS], 0.0, KIND, gl.DotOperandLayout(0, states, 2))
            for EDGE in gl.static_range(2):
                for tile in range(edge if EDGE else 0, seen if EDGE else edge):
                    number = seen + 2 * tile
                    stage, stage_before = (used + number) % STAGES, (used + number + STAGES - 1) % STAGES
                    k = awaited(used + number, ring, ready, KIND)
                    none = gl.full([KEYS, ROWS], 0.0, gl.float32, turned)
                    raw = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
                    raw, product, weights = warpgroup_mma_wait(0, deps=(raw, product, weights))
                    keys = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, turned))
                    across = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, turned))
                    raw = shown(raw, keys[:, None], across[None, :], mask_base, length, EDGE, MASKED)
                    scores = raw * score_scale - lse_memory.load(gl.SliceLayout(0, turned))[None, :]
                    if MASKED:
                        sends = real_or(mask_base, across, length, float("inf"), float("-inf"), MASKED)
                        sent, added = messages_of(gl.minimum(scores, sends[None, :]), message, PRECISE)
                    else:
                        sent, added = messages_of(scores, message, PRECISE)
                    before = past.index(tile).load(gl.SliceLayout(1, turned))
                    sent = gl.convert_layout(sent, gl.DotOperandLayout(0, turned, 2))
                    beliefs = warpgroup_mma(
                        sent, triangle, scores + before[:, None], use_acc=True, is_async=True
                    )
                    beliefs, _ = warpgroup_mma_wait(0, deps=(beliefs, sent))
                    if CAREFUL:
                        raised = gl.maximum(top, gl.max(beliefs, 0))
                        anchor = as_reference(raised, True)
                        shrink = gl.exp2(top - anchor)
                        top = raised
                        beliefs -= anchor[None, :]
                        sums *= gl.convert_layout(shrink, gl.SliceLayout(1, narrow))[:, None]
                        product *= gl.convert_layout(shrink, by_row)[:, None]
                    refined = rounded_weights(beliefs, KIND)
                    tl.debug_barrier()  # all warps have the previous tile's weights
                    refined_memory.store(refined)
                    past.index(tile).store(before + added)
                    if tile > 0:
                        announce(number - 1 + STAGES, stage_before, end, more, ready)
                    announce(number + STAGES, stage, end, more, ready)
                    if EDGE:  # noqa: SIM102 - Triton would evaluate both sides of "and"
                        if (tile + 1 == seen) & more:
                            mbarrier.expect(q_ready, Q_BYTES)
                    tl.debug_barrier()  # weights are there; all warps have used the keys, and the previous values
                    if tile > 0:
                        fetch_tile(number - 1 + STAGES, stage_before, here, following, more, tiles_from)
                    fetch_tile(number + STAGES, stage, here, following, more, tiles_from)
                    if EDGE:  # noqa: SIM102
                        if (tile + 1 == seen) & more:
                            next_one = gl.where(inside, head, next_head)
                            next_place = [following[0], next_one, next_block * ROWS, 0]
                            tma_load(q_map, next_place, q_ready, q_memory)
                    weights = refined_memory.permute((1, 0)).load(gl.DotOperandLayout(0, states, 2))
                    sums = add_row_sums(weights, sums)
                    weights = dropped(weights, rows, tile, seed_ptr, row_base, drop_threshold, DROPS)
                    v = awaited(used + number + 1, ring, ready, KIND)
                    product = warpgroup_mma(weights, v, product, use_acc=True, is_async=True)
            product, weights = warpgroup_mma_wait(0, deps=(product, weights))
            total = gl.convert_layout(gl.max(sums, 1), by_row)
            lse = lse_memory.load(by_row)
            visible = (lse < float("inf")) & (total > 0)
            product *= gl.where(visible, keep_scale / total, 0.0)[:, None]
            tl.debug_barrier()  # all warps have the last weights, and have used the last values
            out.store(product.to(KIND))
            if RESTS:
                store_rest(rest_ptr + row_base * DIM, product, rows, length, KIND, TAIL)
            if RECORDS:
                # Messages of a negative strength raise beliefs, which may overflow: those heads need care too.
                totals = gl.where(lse < float("inf"), total, 1.0)
                lowest_memory.store(gl.where(message[0] < 0.0, 0.0, totals))
            fence_async_shared()
            used += end
            last_stage = (used - 1) % STAGES
            announce(end - 1 + STAGES, last_stage, end, more, ready)
            tl.debug_barrier()  # the output is there
            fetch_tile(end - 1 + STAGES, last_stage, here, following, more, tiles_from)
            tma_store(out_map, [batch, head, block * ROWS, 0], out_memory)
            belief = _hardware_log2(total)
            if CAREFUL:
                belief += gl.convert_layout(top, by_row)
            gl.store(
                belief_ptr + row_base + rows, gl.where(visible, belief, float("inf")), mask=rows < length
            )
            if RECORDS:
                lowest = store_lowest(
                    lowest_memory, lowest_ptr + line * lowest_blocks, block, lowest_blocks, ROWS
                )
                lowest_of_all = gl.minimum(lowest_of_all, lowest)
        store_past(
            reinterpret(past, gl.float32, [past.shape[0] * KEYS], plain), message_sums_ptr + row_base, length
        )
    return used, started, lowest_of_all


@gluon.jit(do_not_specialize=["lines"])
def causal_hopper_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, seed_ptr, lse_ptr, strength_ptr, message_sums_ptr, belief_ptr, lowest_ptr,
    rest_ptr, q_map, k_map, v_map, out_map,
    heads, group, length, lines, lowest_blocks, lowest_sum, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    ROWS: tl.constexpr, TILES: tl.constexpr, TAIL: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    RECORDS: tl.constexpr, REPEATS: tl.constexpr, CAREFUL: tl.constexpr, RESTS: tl.constexpr,
):  # fmt: skip
    """Output of several heads of at most TILES tiles of keys, and what ``causal.launch.saved_slices`` lists, as its sweeps give it.

    RECORDS: stores the smallest normalisers. REPEATS: computes heads again, with care, where one is below ``lowest_sum``.
    """
    WARPS: tl.constexpr = gl.num_warps()
    KIND: tl.constexpr = q_map.dtype
    plain: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    past = gl.allocate_shared_memory(gl.float32, [TILES, KEYS], plain)
    triangle = gl.allocate_shared_memory(gl.float16, [ROWS, ROWS], tile_layout())
    q_ready = new_barrier()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    every_past = reinterpret(past, gl.float32, [TILES * KEYS], plain)
    every_past.store(gl.full([TILES * KEYS], 0.0, gl.float32, vector_layout(WARPS)))
    if PRECISE != 0:
        store_triangle(triangle, 1.0)
    fence_async_shared()
    tl.debug_barrier()

    pointers = (mask_ptr, seed_ptr, lse_ptr, strength_ptr, message_sums_ptr, belief_ptr, lowest_ptr, rest_ptr)
    maps = (q_map, k_map, v_map, out_map)
    memory = (
        gl.allocate_shared_memory(KIND, [1, 1, ROWS, DIM], q_map.layout),
        gl.allocate_shared_memory(KIND, [STAGES, 1, 1, KEYS, DIM], k_map.layout),
        gl.allocate_shared_memory(KIND, [KEYS, ROWS], tile_layout()),
        triangle,
        past,
        gl.allocate_shared_memory(gl.float32, [ROWS], plain),
        gl.allocate_shared_memory(gl.float32, [ROWS], plain),
        q_ready,
        ready,
    )
    sizes, numbers = (heads, group, length, lowest_blocks), (score_scale, drop_threshold, keep_scale)
    strengths = (sign, r0, r1, r2, l0, l1, l2)
    # Concurrent programs process adjacent heads, whose states are adjacent in memory.
    first, step = gl.program_id(0), gl.num_programs(0)
    count = (lines - first + step - 1) // step
    used, started, lowest = refine_heads(
        first, step, count, gl.to_tensor(0), gl.to_tensor(0), pointers, maps, memory, sizes, numbers, strengths,
        ROWS, TAIL, PRECISE, MASKED, DROPS, RECORDS, CAREFUL, RESTS,
    )  # fmt: skip
    if REPEATS:  # noqa: SIM102 - Triton would evaluate both sides of "and"
        if lowest < lowest_sum:
            gl.inline_asm_elementwise(WRITTEN, "=f,f", [lowest], gl.float32, False, 1)
            tl.debug_barrier()
            for turn in range(count):
                line = first + turn * step
                needed = needs_care(lowest_ptr + line * lowest_blocks, lowest_blocks, lowest_sum, TILES)
                used, started, _ = refine_heads(
                    line, step, needed, used, started, pointers, maps, memory, sizes, numbers, strengths,
                    ROWS, TAIL, PRECISE, MASKED, DROPS, False, True, RESTS,
                )  # fmt: skip
    tma.store_wait(0)

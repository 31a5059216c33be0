"""Bidirectional attention of 129 to 256 tokens on Hopper: a program holds a head's whole map, in half precision.

Scores and exponentials are computed once, half of the rows at a time. Messages go to shared memory and are summed over
rows by the tensor cores; refined weights without the keys' factors wait, those of the first half in shared memory and
those of the second in registers, which do not suffice for both. The factors then multiply the
values, 64 numbers per key, instead of the weights, 256 per key: out = R (w V) / (R w). For any strength.
The copy engine (TMA) fetches the program's next head meanwhile, as in ``short_forward``.
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
    warpgroup_mma_wait,
)

from saobp.kernels.bidirectional.short_weak import inverse_or_zero, real_or, store_lse
from saobp.kernels.hopper.short_forward import (
    COLUMNS,
    DIM,
    fetch,
    new_barrier,
    place,
    product_layout,
    tile_layout,
)
from saobp.kernels.library.arithmetic import head_message, head_seed, kept
from saobp.kernels.library.packed_bf16 import messages_and_weights, multiply

KEYS = tl.constexpr(256)
ROWS = tl.constexpr(128)
"""Rows of a part: 16 for each of eight warps."""
PARTS = tl.constexpr(2)
TILE_BYTES = tl.constexpr(2 * 256 * 64)


@gluon.jit
def messages_of(
    raw, bound, score_scale, gamma, says, KIND: tl.constexpr, HEARS: tl.constexpr, GAPS: tl.constexpr
):
    """Messages of pairs of rows, refined weights without the keys' factors, largest scores and sums of exponentials."""
    if GAPS:
        raw = gl.minimum(raw, bound[None, :])
    high = gl.max(raw, 1) * score_scale
    if GAPS:
        high = gl.where(high > float("-inf"), high, 0.0)
    e = gl.exp2(raw * score_scale - high[:, None])
    total = gl.sum(e, 1)
    slope = gamma * inverse_or_zero(total, GAPS)
    if GAPS:
        slope *= says
    sent, refined = messages_and_weights(e, slope, KIND, HEARS == 2)
    values: tl.constexpr = product_layout(DIM, gl.num_warps())
    return sent, gl.convert_layout(refined, gl.DotOperandLayout(0, values, 2)), high, total


@gluon.jit
def key_factors(
    sums, memory, heard_base, weight_base, mask_base, length,
    MASKED: tl.constexpr, GAPS: tl.constexpr,
):  # fmt: skip
    """Stores logarithms and factors of keys; each warp takes all keys."""
    spread: tl.constexpr = gl.BlockedLayout([KEYS // 32], [32], [gl.num_warps()], [0])
    memory.store(gl.max(sums, 1))
    heard = memory.load(spread)
    keys = gl.arange(0, KEYS, spread)
    if GAPS:
        heard = gl.minimum(heard, real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED))
    peak = gl.max(heard, 0)
    heard -= gl.where(peak == float("-inf"), 0.0, peak)
    weight = gl.exp2(heard)
    gl.store(heard_base + keys, heard, mask=keys < length)
    gl.store(weight_base + keys, weight.to(weight_base.dtype.element_ty), mask=keys < length)
    return weight


@gluon.jit(do_not_specialize=["lines"])
def whole_map_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, seed_ptr, lse_ptr, strength_ptr, heard_ptr, weight_ptr, anchor_ptr,
    inverse_ptr, lowest_ptr, q_map, k_map, v_map, out_map,
    heads, group, length, lines, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    TAIL: tl.constexpr, HEARS: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Output of several heads, and what the backward pass of long sequences needs."""
    WARPS: tl.constexpr = gl.num_warps()
    GAPS: tl.constexpr = TAIL or MASKED
    KIND: tl.constexpr = q_map.dtype
    scores: tl.constexpr = product_layout(KEYS, WARPS)
    values: tl.constexpr = product_layout(DIM, WARPS)
    totals: tl.constexpr = product_layout(COLUMNS, WARPS)
    by_row: tl.constexpr = gl.SliceLayout(1, scores)
    by_key: tl.constexpr = gl.SliceLayout(0, scores)
    by_total: tl.constexpr = gl.SliceLayout(1, totals)
    plain: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dropping: tl.constexpr = gl.DotOperandLayout(0, values, 2)
    wide: tl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    thin: tl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [WARPS, 1], [1, 0])

    q_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], q_map.layout)
    k_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], k_map.layout)
    v_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], v_map.layout)
    messages = gl.allocate_shared_memory(gl.float16, [ROWS // 2, KEYS], tile_layout())
    first_half = gl.allocate_shared_memory(KIND, [ROWS, KEYS], tile_layout())
    ones = gl.allocate_shared_memory(gl.float16, [COLUMNS, ROWS // 2], tile_layout()).permute((1, 0))
    ones.store(gl.full([ROWS // 2, COLUMNS], 1.0, gl.float16, thin))
    factors = gl.allocate_shared_memory(KIND, [COLUMNS, KEYS], tile_layout()).permute((1, 0))
    heard_memory = gl.allocate_shared_memory(gl.float32, [KEYS], plain)
    weight_memory = gl.allocate_shared_memory(KIND, [KEYS], plain)
    # The output reuses the shared memory of the messages, which are no longer needed.
    out_memory = messages._reinterpret(KIND, [1, 1, KEYS, DIM], out_map.layout)
    q = q_memory._reinterpret(KIND, [KEYS, DIM], tile_layout())
    k = k_memory._reinterpret(KIND, [KEYS, DIM], tile_layout()).permute((1, 0))
    v = v_memory._reinterpret(KIND, [KEYS, DIM], tile_layout())
    out = out_memory._reinterpret(KIND, [KEYS, DIM], tile_layout())
    q_ready, k_ready, v_ready = new_barrier(), new_barrier(), new_barrier()
    fence_async_shared()

    first, step = gl.program_id(0), gl.num_programs(0)
    count = (lines - first + step - 1) // step
    batch, head, key_head = place(first, heads, group)
    mbarrier.expect(q_ready, TILE_BYTES)
    mbarrier.expect(k_ready, TILE_BYTES)
    mbarrier.expect(v_ready, TILE_BYTES)
    tl.debug_barrier()
    fetch(q_map, batch, head, q_memory, q_ready)
    fetch(k_map, batch, key_head, k_memory, k_ready)
    fetch(v_map, batch, key_head, v_memory, v_ready)
    tl.debug_barrier()

    for turn in range(count):
        phase = turn & 1
        more = turn + 1 < count
        line = first + turn * step
        batch, head, _ = place(line, heads, group)
        next_batch, next_head, next_key_head = place(line + step, heads, group)
        row_base = line.to(gl.int64) * length
        mask_base = mask_ptr + batch.to(gl.int64) * length
        gamma = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)[0]
        keys = gl.arange(0, KEYS, by_key)
        bound = real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED)

        sums = gl.full([KEYS, COLUMNS], 0.0, gl.float32, totals)
        priors = ()
        mbarrier.wait(q_ready, phase)
        mbarrier.wait(k_ready, phase)
        for part in gl.static_range(PARTS):
            nothing = gl.full([ROWS, KEYS], 0.0, gl.float32, scores)
            raw = warpgroup_mma(q.slice(part * ROWS, ROWS), k, nothing, use_acc=False, is_async=True)
            # Also waits for the previous part's sums. After the barrier messages may be overwritten.
            raw = warpgroup_mma_wait(0, deps=(raw,))
            if part == 0:
                tma.store_wait(0)
            tl.debug_barrier()
            if part == 1 and more:
                mbarrier.expect(q_ready, TILE_BYTES)
                mbarrier.expect(k_ready, TILE_BYTES)
                tl.debug_barrier()
                fetch(q_map, next_batch, next_head, q_memory, q_ready)
                fetch(k_map, next_batch, next_key_head, k_memory, k_ready)
            rows = part * ROWS + gl.arange(0, ROWS, by_row)
            says = real_or(mask_base, rows, length, 1.0, 0.0, MASKED) if GAPS else 1.0
            sent, refined, high, total = messages_of(raw, bound, score_scale, gamma, says, KIND, HEARS, GAPS)
            store_lse(lse_ptr + row_base, rows, length, high, total, GAPS)
            messages.store(sent)
            if part == 0:
                first_half.store(refined)
            fence_async_shared()
            tl.debug_barrier()
            sums = warpgroup_mma(messages.permute((1, 0)), ones, sums, use_acc=part > 0, is_async=True)
            priors += (total,)

        sums = warpgroup_mma_wait(0, deps=(sums,))
        weight = key_factors(
            sums, heard_memory, heard_ptr + row_base, weight_ptr + row_base, mask_base, length,
            MASKED, GAPS,
        )  # fmt: skip
        weight_memory.store(weight.to(KIND))
        mbarrier.wait(v_ready, phase)
        factors.store(
            gl.full([KEYS, COLUMNS], 1.0, KIND, thin) * weight_memory.load(gl.SliceLayout(1, thin))[:, None]
        )
        v.store(multiply(v.load(wide), weight_memory.load(gl.SliceLayout(1, wide))[:, None]))
        fence_async_shared()
        tl.debug_barrier()
        for part in gl.static_range(PARTS):
            none = gl.full([ROWS, COLUMNS], 0.0, gl.float32, totals)
            nothing = gl.full([ROWS, DIM], 0.0, gl.float32, values)
            weights = first_half if part == 0 else refined
            total = warpgroup_mma(weights, factors, none, use_acc=False, is_async=True)
            if DROPS:
                weights = first_half.load(dropping) if part == 0 else refined
                rows = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, dropping))
                columns = gl.arange(0, KEYS, gl.SliceLayout(0, dropping))
                seed = head_seed(seed_ptr, row_base, DROPS)
                weights = gl.where(kept(seed, rows[:, None], columns[None, :], drop_threshold), weights, 0.0)
            product = warpgroup_mma(weights, v, nothing, use_acc=False, is_async=True)
            product, total, _ = warpgroup_mma_wait(0, deps=(product, total, refined))
            total = gl.max(total, 1)
            inverse = inverse_or_zero(total, GAPS)
            rows = part * ROWS + gl.arange(0, ROWS, by_total)
            prior = gl.convert_layout(priors[part], by_total)
            gl.store(inverse_ptr + row_base + rows, inverse * prior, mask=rows < length)
            gl.store(anchor_ptr + row_base + rows, inverse * 0.0, mask=rows < length)
            lowest = gl.min(gl.where(prior > 0.0, total * inverse_or_zero(prior, GAPS), 1.0), 0)
            gl.store(lowest_ptr + line * PARTS + part, lowest)
            factor = gl.convert_layout(keep_scale * inverse, gl.SliceLayout(1, values))
            out.slice(part * ROWS, ROWS).store((product * factor[:, None]).to(KIND))
        fence_async_shared()
        tl.debug_barrier()
        if more:
            mbarrier.expect(v_ready, TILE_BYTES)
            tl.debug_barrier()
            fetch(v_map, next_batch, next_key_head, v_memory, v_ready)
        tma.async_copy_shared_to_global(out_map, [batch, head, 0, 0], out_memory)
    tma.store_wait(0)

"""``short_weak_forward`` for Hopper: a program takes several heads in turn, and the copy engine fetches the next one meanwhile.

The arithmetic is that of ``short_weak``. Queries, keys and values lie in shared memory once: as soon as the scores of a head
are known, the next head's queries and keys are fetched into the same place, and its values as soon as these have been
multiplied. So there is no second stage, and several programs share a multiprocessor.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from saobp.kernels.arithmetic import head_message, head_seed, kept
from saobp.kernels.pairs import multiply, pair_logarithm, rounded
from saobp.kernels.short_weak import boosted_rows, inverse_or_zero, polynomial, real_or, store_lse

KEYS = gl.constexpr(128)
DIM = gl.constexpr(64)
COLUMNS = gl.constexpr(8)
"""Of products that only add up."""


@gluon.constexpr_function
def tile_layout():
    """Of tiles of half types in shared memory, as the copy engine writes and the tensor cores read them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def product_layout(columns, warps):
    """Of a product of that many columns in registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def narrow_layout(warps):
    """Of sums of rows, by the smaller tensor instruction that takes both factors from registers."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.jit
def row_sums_of(tile):
    """Sums of the rows of a tile in a half type."""
    narrow: gl.constexpr = narrow_layout(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, narrow, 2)
    ones = gl.full([tile.shape[1], COLUMNS], 1.0, tile.dtype, right)
    none = gl.full([tile.shape[0], COLUMNS], 0.0, gl.float32, narrow)
    return gl.max(mma_v2(gl.convert_layout(tile, left), ones, none), 1)


@gluon.jit
def place(line, heads, group):
    """Batch, head and key head of a line: heads of all sequences, one after the other."""
    batch = line // heads
    head = line - batch * heads
    return batch, head, head // group


@gluon.jit
def fetch(tensor_map, batch, head, into, barrier, there):
    """Asks the copy engine for the rows of a head, a part of them to each tile of ``into``; the barrier tells when all are there."""
    PARTS: gl.constexpr = into.shape[0]
    ROWS: gl.constexpr = into.shape[3]
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(
            tensor_map, [batch, head, part * ROWS, 0], barrier, into.index(part), there
        )


@gluon.jit
def tile_of(memory, part, KIND: gl.constexpr):
    """One part of the states of a head as rows and columns."""
    return memory.index(part)._reinterpret(KIND, [memory.shape[3], memory.shape[4]], tile_layout())


@gluon.jit
def prior_rows(raw, bound, score_scale, KIND: gl.constexpr, GAPS: gl.constexpr):
    """As ``short_weak.prior_rows``, of scores that are known."""
    if GAPS:
        raw = gl.minimum(raw, bound[None, :])
    high = gl.max(raw, 1) * score_scale
    if GAPS:
        high = gl.where(high > float("-inf"), high, 0.0)
    e = gl.exp2(raw * score_scale - high[:, None])
    fine, coarse = rounded(e, gl.float16), rounded(e, KIND)
    total = gl.convert_layout(row_sums_of(fine), high.type.layout)
    return fine, coarse, high, total


@gluon.jit
def keep_factors(factors, inverse):
    """Puts the factors of ``short_weak.add_heard`` into shared memory ``[rows, columns]``."""
    narrow: gl.constexpr = narrow_layout(gl.num_warps())
    exact = gl.convert_layout(inverse, gl.SliceLayout(1, narrow))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, narrow))[None, :]
    near = exact.to(gl.float16)
    left = (exact - near.to(gl.float32)).to(gl.float16)
    factors.store(gl.where(column == 0, near, gl.where(column == 1, left, 0.0)))


@gluon.jit
def short_hopper_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, key_part_ptr, anchor_ptr,
    q_map, k_map, v_map, out_map,
    heads, group, length, lines, heads_each, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    TAIL: gl.constexpr, HEARS: gl.constexpr, MASKED: gl.constexpr, DROPS: gl.constexpr, SAVES: gl.constexpr,
):  # fmt: skip
    """Output of ``heads_each`` heads, and what the backward pass needs, as by ``short_weak.short_weak_forward``."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 16 * WARPS
    PARTS: gl.constexpr = KEYS // ROWS
    GAPS: gl.constexpr = TAIL or MASKED
    KIND: gl.constexpr = q_map.dtype
    scores: gl.constexpr = product_layout(KEYS, WARPS)
    values: gl.constexpr = product_layout(DIM, WARPS)
    totals: gl.constexpr = product_layout(COLUMNS, WARPS)
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    by_key: gl.constexpr = gl.SliceLayout(0, scores)
    by_sum: gl.constexpr = gl.SliceLayout(1, totals)

    q_memory = gl.allocate_shared_memory(KIND, [PARTS, 1, 1, ROWS, DIM], q_map.layout)
    k_memory = gl.allocate_shared_memory(KIND, [1, 1, 1, KEYS, DIM], k_map.layout)
    v_memory = gl.allocate_shared_memory(KIND, [1, 1, 1, KEYS, DIM], v_map.layout)
    messages = gl.allocate_shared_memory(gl.float16, [ROWS, KEYS], tile_layout())
    # Messages are done with when the output is made.
    out_memory = messages._reinterpret(KIND, [PARTS, 1, 1, ROWS, DIM], out_map.layout)
    factors = gl.allocate_shared_memory(gl.float16, [COLUMNS, ROWS], tile_layout()).permute((1, 0))
    scores_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(scores_ready, count=1)
    mbarrier.init(values_ready, count=1)
    tl.debug_barrier()

    first = gl.program_id(0) * heads_each
    count = gl.minimum(heads_each, lines - first)
    batch, head, key_head = place(first, heads, group)
    mbarrier.expect(scores_ready, 2 * 2 * KEYS * DIM)
    fetch(k_map, batch, key_head, k_memory, scores_ready, True)
    fetch(q_map, batch, head, q_memory, scores_ready, True)
    mbarrier.expect(values_ready, 2 * KEYS * DIM)
    fetch(v_map, batch, key_head, v_memory, values_ready, True)

    for turn in range(count):
        phase = turn & 1
        more = turn + 1 < count
        batch, head, _ = place(first + turn, heads, group)
        next_batch, next_head, next_key_head = place(first + turn + 1, heads, group)
        row_base = (batch.to(gl.int64) * heads + head) * length
        mask_base = mask_ptr + batch.to(gl.int64) * length
        message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
        keys = gl.arange(0, KEYS, by_key)
        bound = real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED)

        sums = gl.full([KEYS, COLUMNS], 0.0, gl.float32, totals)
        k = tile_of(k_memory, 0, KIND).permute((1, 0))
        waiting = ()
        mbarrier.wait(scores_ready, phase)
        for part in gl.static_range(PARTS):
            nothing = gl.full([ROWS, KEYS], 0.0, gl.float32, scores)
            raw = warpgroup_mma(tile_of(q_memory, part, KIND), k, nothing, use_acc=False, is_async=True)
            # Also waits for sums of the part before. Then messages may be overwritten, as soon as all warps are here.
            raw = warpgroup_mma_wait(0, deps=(raw,))
            if part == 0:
                tma.store_wait(0)
            tl.debug_barrier()
            if part == PARTS - 1:
                mbarrier.expect(scores_ready, 2 * 2 * KEYS * DIM, more)
                fetch(k_map, next_batch, next_key_head, k_memory, scores_ready, more)
                fetch(q_map, next_batch, next_head, q_memory, scores_ready, more)
            fine, coarse, high, total = prior_rows(raw, bound, score_scale, KIND, GAPS)
            rows = part * ROWS + gl.arange(0, ROWS, by_row)
            if SAVES:
                store_lse(lse_ptr + row_base, rows, length, high, total, GAPS)
            inverse = inverse_or_zero(total, GAPS)
            if GAPS:
                inverse *= real_or(mask_base, rows, length, 1.0, 0.0, MASKED)
            if HEARS:
                unit, slope, bend = pair_logarithm(message)
                messages.store(polynomial(fine, slope.to(gl.float32), bend.to(gl.float32), inverse))
                keep_factors(factors, inverse)
                fence_async_shared()
                tl.debug_barrier()
                sums = warpgroup_mma(messages.permute((1, 0)), factors, sums, use_acc=part > 0, is_async=True)
            waiting = waiting + (boosted_rows(coarse, inverse, message),)

        if HEARS:
            sums = warpgroup_mma_wait(0, deps=(sums,))
            heard = gl.sum(sums, 1) * pair_logarithm(message)[0]
            keys_summed = gl.arange(0, KEYS, by_sum)
            if GAPS:
                heard = gl.minimum(
                    heard, real_or(mask_base, keys_summed, length, float("inf"), float("-inf"), MASKED)
                )
            peak = gl.max(heard, 0)
            weight = gl.exp2(heard - gl.where(peak == float("-inf"), 0.0, peak))
            if SAVES:
                gl.store(key_part_ptr + row_base + keys_summed, weight, mask=keys_summed < length)
            weight = gl.convert_layout(weight.to(KIND), by_key)
        mbarrier.wait(values_ready, phase)
        v = tile_of(v_memory, 0, KIND)
        for part in gl.static_range(PARTS):
            refined = waiting[part]
            if HEARS:
                refined = multiply(refined, weight[None, :])
            total = row_sums_of(refined)
            if DROPS:
                rows = part * ROWS + gl.arange(0, ROWS, by_row)
                seed = head_seed(seed_ptr, row_base)
                refined = gl.where(kept(seed, rows[:, None], keys[None, :], drop_threshold), refined, 0.0)
            refined = gl.convert_layout(refined, gl.DotOperandLayout(0, values, 2))
            nothing = gl.full([ROWS, DIM], 0.0, gl.float32, values)
            out = warpgroup_mma(refined, v, nothing, use_acc=False, is_async=True)
            out = warpgroup_mma_wait(0, deps=(out,))
            factor = keep_scale * inverse_or_zero(total, GAPS)
            out *= gl.convert_layout(factor, gl.SliceLayout(1, values))[:, None]
            tile_of(out_memory, part, KIND).store(out.to(KIND))
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.expect(values_ready, 2 * KEYS * DIM, more)
        fetch(v_map, next_batch, next_key_head, v_memory, values_ready, more)
        for part in gl.static_range(PARTS):
            tma.async_copy_shared_to_global(out_map, [batch, head, part * ROWS, 0], out_memory.index(part))
    tma.store_wait(0)

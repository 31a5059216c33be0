# mypy: ignore-errors
"""129 to 256 tokens on Hopper: a program of sixteen warps holds a head's whole map in registers, forward in one launch.

The three sweeps of ``bidirectional/`` in one: scores are computed once, half of the keys at a time, rounded right after
the exponential and kept. A thread has two rows of 64 keys, so rows need no other warp. Messages, summed over pairs of rows,
go to shared memory, and the tensor cores sum them over all rows. For any strength: see ``messages_and_weights``.

Exponentials of the first half are relative to its own largest score; ``shrink`` makes them relative to the row's.
TMA fetches the next head's queries and keys as soon as all scores are computed, and its values
after the output.
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
from saobp.kernels.hopper.head_tiles import (
    COLUMNS,
    DIM,
    add_row_sums,
    fetch,
    fetch_head,
    narrow_layout,
    new_barrier,
    place,
    product_layout,
    tile_layout,
)
from saobp.kernels.library.arithmetic import head_message, head_seed, kept
from saobp.kernels.library.gluon_names import reinterpret, tma_store
from saobp.kernels.library.packed_bf16 import multiply, packed_messages

KEYS = tl.constexpr(256)
HALF = tl.constexpr(128)
TILE_BYTES = tl.constexpr(2 * 256 * 64)
BLOCKS = tl.constexpr(2)
"""Blocks of 128 rows, each of which records its smallest normaliser."""
_POWERS = (
    "{ .reg .f32 x, y; fma.rn.f32 x, $1, $3, $5; fma.rn.f32 y, $2, $4, $6;"
    " ex2.approx.ftz.f32 x, x; ex2.approx.ftz.f32 y, y; cvt.rn.KIND.f32 $0, y, x; }"
)
POWERS_BF16 = tl.constexpr(_POWERS.replace("KIND", "bf16x2"))
POWERS_F16 = tl.constexpr(_POWERS.replace("KIND", "f16x2"))


@gluon.jit
def rounded_powers(raw, score_scale, high, KIND: tl.constexpr):
    """2^(raw score_scale - high) in KIND. One block of assembly, so that no tile of float32 stays live."""
    operands = [raw, score_scale, -high]
    if KIND.is_fp16():
        return gl.inline_asm_elementwise(POWERS_F16, "=r,f,f,f,f,f,f", operands, gl.float16, True, 2)
    else:
        return gl.inline_asm_elementwise(POWERS_BF16, "=r,f,f,f,f,f,f", operands, gl.bfloat16, True, 2)


@gluon.jit
def start_scores(q, k, half: tl.constexpr):
    """Starts the products ``[rows, keys]`` of all rows with half of the keys."""
    nothing = gl.full([KEYS, HALF], 0.0, gl.float32, product_layout(HALF, gl.num_warps()))
    return warpgroup_mma(q, k.slice(half * HALF, HALF).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def shown(raw, mask_base, length, half: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr):
    """Products of half of the keys; minus infinity for missing ones. Without a mask the first half has none."""
    keys = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, product_layout(HALF, gl.num_warps())))
    if MASKED:
        bound = real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED)
        raw = gl.minimum(raw, bound[None, :])
    elif TAIL and half == 1:
        raw = gl.where((keys < length)[None, :], raw, float("-inf"))
    return raw


@gluon.jit
def as_reference(top, MASKED: tl.constexpr):
    """A largest score to subtract: 0 in place of minus infinity, of no key."""
    if MASKED:
        top = gl.where(top > float("-inf"), top, 0.0)
    return top


@gluon.jit
def key_weights(
    sums, memory, message_sums_base, weight_base, mask_base, length,
    TAIL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Weights of keys from their log-message sums, both stored. Each warp takes all keys: no reduction across warps."""
    spread: tl.constexpr = gl.BlockedLayout([KEYS // 32], [32], [gl.num_warps()], [0])
    memory.store(gl.max(sums, 1))
    message_sums = memory.load(spread)
    keys = gl.arange(0, KEYS, spread)
    if TAIL or MASKED:
        message_sums = gl.minimum(
            message_sums, real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED)
        )
    peak = gl.max(message_sums, 0)
    message_sums -= gl.where(peak == float("-inf"), 0.0, peak)
    weight = gl.exp2(message_sums)
    gl.store(message_sums_base + keys, message_sums, mask=keys < length)
    gl.store(weight_base + keys, weight.to(weight_base.dtype.element_ty), mask=keys < length)
    return weight


@gluon.jit
def dropped(weights, seed_ptr, row_base, drop_threshold, half: tl.constexpr, DROPS: tl.constexpr):
    """Weights of half of the keys after dropout, but for the factor of those kept."""
    if DROPS:
        maps: tl.constexpr = product_layout(HALF, gl.num_warps())
        rows = gl.arange(0, KEYS, gl.SliceLayout(1, maps))
        keys = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, maps))
        seed = head_seed(seed_ptr, row_base, DROPS)
        weights = gl.where(kept(seed, rows[:, None], keys[None, :], drop_threshold), weights, 0.0)
    return weights


@gluon.jit
def store_lowest(memory, lowest_base):
    """Smallest normaliser of each block of rows. Each warp takes all rows, as in ``key_weights``."""
    spread: tl.constexpr = gl.BlockedLayout([1, KEYS // 32], [2, 16], [gl.num_warps(), 1], [1, 0])
    rows = reinterpret(memory, gl.float32, [BLOCKS, HALF], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    gl.store(lowest_base + gl.arange(0, BLOCKS, gl.SliceLayout(1, spread)), gl.min(rows.load(spread), 1))


@gluon.jit(do_not_specialize=["lines"])
def whole_map_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, seed_ptr, lse_ptr, strength_ptr, message_sums_ptr, weight_ptr,
    anchor_ptr, inverse_ptr, lowest_ptr,
    q_map, k_map, v_map, out_map,
    heads, group, length, lines, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    TAIL: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Output of several heads, and what ``bidirectional.launch.saved_slices`` lists, as its sweeps give it."""
    WARPS: tl.constexpr = gl.num_warps()
    GAPS: tl.constexpr = TAIL or MASKED
    KIND: tl.constexpr = q_map.dtype
    values: tl.constexpr = product_layout(DIM, WARPS)
    operand: tl.constexpr = gl.DotOperandLayout(0, values, 2)
    by_row: tl.constexpr = gl.SliceLayout(1, product_layout(HALF, WARPS))
    by_key: tl.constexpr = gl.SliceLayout(0, product_layout(HALF, WARPS))
    plain: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    q_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], q_map.layout)
    k_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], k_map.layout)
    v_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], v_map.layout)
    out_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], out_map.layout)
    messages = gl.allocate_shared_memory(gl.float16, [HALF, KEYS], tile_layout())
    ones = gl.allocate_shared_memory(gl.float16, [COLUMNS, HALF], tile_layout()).permute((1, 0))
    ones.store(gl.full([HALF, COLUMNS], 1.0, gl.float16, narrow_layout(WARPS)))
    sums_memory = gl.allocate_shared_memory(gl.float32, [KEYS], plain)
    lowest_memory = gl.allocate_shared_memory(gl.float32, [KEYS], plain)
    weight_memory = gl.allocate_shared_memory(KIND, [KEYS], plain)
    q = reinterpret(q_memory, KIND, [KEYS, DIM], tile_layout())
    k = reinterpret(k_memory, KIND, [KEYS, DIM], tile_layout())
    v = reinterpret(v_memory, KIND, [KEYS, DIM], tile_layout())
    out = reinterpret(out_memory, KIND, [KEYS, DIM], tile_layout())
    q_ready, k_ready, v_ready = new_barrier(), new_barrier(), new_barrier()
    fence_async_shared()

    # Concurrent programs process adjacent heads, whose states are adjacent in memory.
    first, step = gl.program_id(0), gl.num_programs(0)
    count = (lines - first + step - 1) // step
    batch, head, key_head = place(first, heads, group)
    fetch_head(
        q_map, k_map, v_map, batch, head, key_head, q_memory, k_memory, v_memory, q_ready, k_ready, v_ready,
        TILE_BYTES,
    )  # fmt: skip

    for turn in range(count):
        phase = turn & 1
        more = turn + 1 < count
        batch, head, _ = place(first + turn * step, heads, group)
        next_batch, next_head, next_key_head = place(first + (turn + 1) * step, heads, group)
        line = batch.to(gl.int64) * heads + head
        row_base = line * length
        mask_base = mask_ptr + batch.to(gl.int64) * length
        message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
        rows = gl.arange(0, KEYS, by_row)

        mbarrier.wait(q_ready, phase)
        mbarrier.wait(k_ready, phase)
        raw = shown(warpgroup_mma_wait(0, deps=(start_scores(q, k, 0),)), mask_base, length, 0, TAIL, MASKED)
        first_top = gl.max(raw, 1) * score_scale
        weights = rounded_powers(raw, score_scale, as_reference(first_top, MASKED)[:, None], KIND)
        sums = add_row_sums(weights, gl.full([KEYS, COLUMNS], 0.0, gl.float32, narrow_layout(WARPS)))
        raw = warpgroup_mma_wait(0, deps=(start_scores(q, k, 1),))
        raw = shown(raw, mask_base, length, 1, TAIL, MASKED)
        high = as_reference(gl.maximum(first_top, gl.max(raw, 1) * score_scale), MASKED)
        weights_2 = rounded_powers(raw, score_scale, high[:, None], KIND)
        shrink = gl.exp2(first_top - high)
        sums *= gl.convert_layout(shrink, gl.SliceLayout(1, narrow_layout(WARPS)))[:, None]
        total = gl.convert_layout(gl.max(add_row_sums(weights_2, sums), 1), by_row)
        slope = message[0] * inverse_or_zero(total, MASKED)
        if GAPS:
            slope *= real_or(mask_base, rows, length, 1.0, 0.0, MASKED)
        sent, weights = packed_messages(weights, slope, shrink, True, RECEIVES == 2)
        messages.slice(0, HALF, 1).store(sent)
        sent, weights_2 = packed_messages(weights_2, slope, shrink, False, RECEIVES == 2)
        messages.slice(HALF, HALF, 1).store(sent)
        weights = gl.convert_layout(weights, product_layout(HALF, WARPS))
        weights_2 = gl.convert_layout(weights_2, product_layout(HALF, WARPS))
        if more:
            mbarrier.expect(q_ready, TILE_BYTES)
            mbarrier.expect(k_ready, TILE_BYTES)
        fence_async_shared()
        tma.store_wait(0)
        tl.debug_barrier()  # all scores are computed, all messages are there, and the previous output has left
        none = gl.full([KEYS, COLUMNS], 0.0, gl.float32, product_layout(COLUMNS, WARPS))
        sums = warpgroup_mma(messages.permute((1, 0)), ones, none, use_acc=False, is_async=True)
        if more:
            fetch(q_map, next_batch, next_head, q_memory, q_ready)
            fetch(k_map, next_batch, next_key_head, k_memory, k_ready)
        store_lse(lse_ptr + row_base, rows, length, high, total, GAPS)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        weight = key_weights(
            sums, sums_memory, message_sums_ptr + row_base, weight_ptr + row_base, mask_base, length, TAIL, MASKED
        )  # fmt: skip
        mbarrier.wait(v_ready, phase)
        weight_memory.store(weight.to(KIND))

        none = gl.full([KEYS, DIM], 0.0, gl.float32, values)
        weights = multiply(weights, weight_memory.slice(0, HALF).load(by_key)[None, :])
        refined_sums = add_row_sums(weights, gl.full([KEYS, COLUMNS], 0.0, gl.float32, narrow_layout(WARPS)))
        weights = gl.convert_layout(dropped(weights, seed_ptr, row_base, drop_threshold, 0, DROPS), operand)
        product = warpgroup_mma(weights, v.slice(0, HALF), none, use_acc=False, is_async=True)
        weights_2 = multiply(weights_2, weight_memory.slice(HALF, HALF).load(by_key)[None, :])
        refined_total = gl.convert_layout(gl.max(add_row_sums(weights_2, refined_sums), 1), by_row)
        weights_2 = gl.convert_layout(
            dropped(weights_2, seed_ptr, row_base, drop_threshold, 1, DROPS), operand
        )
        product = warpgroup_mma(weights_2, v.slice(HALF, HALF), product, use_acc=True, is_async=True)
        inverse = inverse_or_zero(refined_total, MASKED)
        normaliser = refined_total * inverse_or_zero(total, MASKED)
        lowest_memory.store(gl.where((rows < length) & (total > 0), normaliser, 1.0))
        factor = gl.convert_layout(keep_scale * inverse, gl.SliceLayout(1, values))
        product, _, _ = warpgroup_mma_wait(0, deps=(product, weights, weights_2))
        if more:
            mbarrier.expect(v_ready, TILE_BYTES)
        out.store((product * factor[:, None]).to(KIND))
        fence_async_shared()
        tl.debug_barrier()  # the output is there, and nobody needs the values any more
        if more:
            fetch(v_map, next_batch, next_key_head, v_memory, v_ready)
        tma_store(out_map, [batch, head, 0, 0], out_memory)
        store_lowest(lowest_memory, lowest_ptr + line * BLOCKS)
        saved = total * inverse
        if PRECISE == 0 and RECEIVES == 1:
            saved *= r0  # backward divides by messages but for this factor
        gl.store(inverse_ptr + row_base + rows, saved, mask=rows < length)
        gl.store(anchor_ptr + row_base + rows, gl.full([KEYS], 0.0, gl.float32, by_row), mask=rows < length)
    tma.store_wait(0)

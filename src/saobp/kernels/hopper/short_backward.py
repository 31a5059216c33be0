# mypy: ignore-errors
"""The backward pass of short maps for Hopper: a program processes several heads, and TMA prefetches the next.

The arithmetic is that of ``bidirectional/short.py``, except that factors of a row are applied to sums of the row: with
e = a sum(e) and x = e / (1 - gamma a), u is x / sum(e). States are double-buffered in shared memory, gradients are written
by TMA while the next head is computed. A program of eight warps fills a multiprocessor's registers, so nothing
else would run while it waits for memory.

CAREFUL: the rows' normalisers are stored. If one is too small for products of weights, ``short_careful_backward`` computes that
head again.
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

from saobp.kernels.bidirectional.short import inverse_or_zero
from saobp.kernels.bidirectional.short_weak import real_or
from saobp.kernels.hopper.head_tiles import DIM, fetch, place, product_layout, tile_layout
from saobp.kernels.hopper.short_forward import KEYS, TILE_BYTES
from saobp.kernels.library.arithmetic import INTERPRETED, head_message, head_seed, kept, over_message
from saobp.kernels.library.gluon_names import reinterpret, tma_store
from saobp.kernels.library.packed_bf16 import _halves, row_pairs


def _halving(lane: int) -> tl.constexpr:
    """Assembly: threads that differ in this bit of their number exchange one number of two and add the other's to their own.

    A thread with the bit set goes on with the second number, others with the first.
    """
    return tl.constexpr(
        "{ .reg .pred p; .reg .b32 l; .reg .f32 kept, sent; mov.u32 l, %tid.x;"
        f" and.b32 l, l, {lane}; setp.ne.u32 p, l, 0; selp.f32 kept, $2, $1, p; selp.f32 sent, $1, $2, p;"
        f" shfl.sync.bfly.b32 sent, sent, {lane}, 31, 0xffffffff; add.f32 $0, kept, sent; }}"
    )


HALVE_16, HALVE_8, HALVE_4 = _halving(16), _halving(8), _halving(4)


@gluon.jit
def column_sums(tile, partial_memory, sums_memory):
    """Sums over the rows of a map, left in ``sums_memory``. A barrier must follow.

    In a product's layout 8 threads of a warp have the same columns, 4 numbers apart. Each time they exchange half of their
    sums, so that each ends with an eighth of the columns: 28 exchanges, where adding up every column takes 96.
    """
    if INTERPRETED:
        sums_memory.store(gl.sum(tile, 0))
    else:
        WARPS: tl.constexpr = gl.num_warps()
        top, bottom = row_pairs(tile)
        even, odd = _halves(top + bottom)
        sums = gl.inline_asm_elementwise(HALVE_16, "=f,f,f", [even, odd], gl.float32, False, 1)
        even, odd = _halves(sums)
        sums = gl.inline_asm_elementwise(HALVE_8, "=f,f,f", [even, odd], gl.float32, False, 1)
        even, odd = _halves(sums)
        sums = gl.inline_asm_elementwise(HALVE_4, "=f,f,f", [even, odd], gl.float32, False, 1)
        # Rows are now 16 of a warp's 8 threads, by bits of their number; columns every eighth group of 8.
        sums = gl.permute(gl.reshape(sums, [WARPS, 2, 2, 2, KEYS // 64, 8]), (0, 4, 3, 2, 1, 5))
        partial_memory.store(gl.reshape(sums, [WARPS, KEYS]))
        tl.debug_barrier()
        whole: tl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
        sums_memory.store(gl.sum(partial_memory.load(whole), 0))


@gluon.jit
def fetch_states(q_map, k_map, v_map, grad_map, batch, head, key_head, q, k, v, g, ready):
    """Starts the fetch of a head's states into one half of each buffer; its barrier expects them already."""
    fetch(q_map, batch, head, q, ready)
    fetch(k_map, batch, key_head, k, ready)
    fetch(v_map, batch, key_head, v, ready)
    fetch(grad_map, batch, head, g, ready)


@gluon.jit
def received(e, x, weight, RECEIVES: tl.constexpr):
    """Refined weights of rows but for a factor of each row."""
    if RECEIVES == 2:
        return e * weight[None, :]
    elif RECEIVES:
        return x * weight[None, :]
    else:
        return x


@gluon.jit
def dropped(weights, dropout, DROPS: tl.constexpr):
    """As ``arithmetic.drop_scaled``."""
    if DROPS:
        seed_ptr, row_base, rows, keys, drop_threshold, keep_scale = dropout
        seed = head_seed(seed_ptr, row_base, DROPS)
        weights = gl.where(
            kept(seed, rows[:, None], keys[None, :], drop_threshold), weights * keep_scale, 0.0
        )
    return weights


@gluon.jit
def head_gradients(
    q, k, v, g, map_memory, dq_memory, dk_memory, dv_memory, weight_memory, partial_memory, sums_memory, ready, phase,
    dv_map, batch, head, mask_base, seed_ptr, lse_base, strength_ptr, key_part_base, strength_grad_base, totals_base, row_base,
    length, scale, score_scale, drop_threshold, keep_scale, share, sign, r0, r1, r2, l0, l1, l2,
    KIND: tl.constexpr, TAIL: tl.constexpr, RECEIVES: tl.constexpr, WEAK: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, STRIDE: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """Gradients of a head, dV on its way to memory, the others in shared memory. STORES: the rows' normalisers too."""
    WARPS: tl.constexpr = gl.num_warps()
    GAPS: tl.constexpr = TAIL or MASKED
    maps: tl.constexpr = product_layout(KEYS, WARPS)
    states: tl.constexpr = product_layout(DIM, WARPS)
    by_row: tl.constexpr = gl.SliceLayout(1, maps)
    by_key: tl.constexpr = gl.SliceLayout(0, maps)
    spread: tl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    rows, keys, spread_keys = (
        gl.arange(0, KEYS, by_row),
        gl.arange(0, KEYS, by_key),
        gl.arange(0, KEYS, spread),
    )
    no_map = gl.full([KEYS, KEYS], 0.0, gl.float32, maps)
    no_states = gl.full([KEYS, DIM], 0.0, gl.float32, states)

    high = gl.load(lse_base + rows, mask=rows < length, other=float("inf"))
    if RECEIVES:
        message_sums = gl.load(key_part_base + spread_keys, mask=spread_keys < length, other=float("-inf"))
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    gamma, r0, r1, r2, l0, l1, l2 = message
    mbarrier.wait(ready, phase)
    raw = warpgroup_mma(q, k.permute((1, 0)), no_map, use_acc=False, is_async=True)
    if RECEIVES:
        weight_memory.store(gl.exp2(message_sums))
    tma.store_wait(0)
    raw = warpgroup_mma_wait(0, deps=(raw,))
    tl.debug_barrier()  # weights are there; gradients of the previous head have left

    bound = real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED)
    if GAPS:
        raw = gl.minimum(raw, bound[None, :])
    e = gl.exp2(raw * score_scale - high[:, None])
    inverse = inverse_or_zero(gl.sum(e, 1), GAPS)
    sends = real_or(mask_base, rows, length, 1.0, 0.0, MASKED) if GAPS else 1.0
    slope = gamma * inverse
    if GAPS:
        slope *= sends
    if WEAK:
        bend, curve = r1 * inverse, r2 * inverse * inverse
        if GAPS:
            bend, curve = bend * sends, curve * sends
        x = e * (r0 + e * (bend[:, None] + e * curve[:, None]))
    else:
        x = over_message(e, slope[:, None])
    if RECEIVES:
        refined = received(e, x, weight_memory.load(by_key), RECEIVES)
    else:
        refined = x
    total = gl.sum(refined, 1)
    factor = inverse_or_zero(total, GAPS)
    if STORES:
        gl.store(totals_base + rows, gl.where(high < float("inf"), total, 1.0), mask=rows < length)
    dropout = (seed_ptr, row_base, rows, keys, drop_threshold, keep_scale)
    map_memory.store(dropped(refined * factor[:, None], dropout, DROPS).to(KIND))
    fence_async_shared()
    tl.debug_barrier()

    dv = warpgroup_mma(map_memory.permute((1, 0)), g, no_states, use_acc=False, is_async=True)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    dv_memory.store(dv.to(KIND))
    d_rows = warpgroup_mma(g, v.permute((1, 0)), no_map, use_acc=False, is_async=True)
    d_rows = warpgroup_mma_wait(0, deps=(d_rows,))
    d_rows = dropped(d_rows, dropout, DROPS)
    if RECEIVES == 0:
        delta = factor * (factor * gl.sum(refined * d_rows, 1))
        d_logits = refined * (d_rows * factor[:, None] - delta[:, None])
    else:  # without the refined weights: three maps fit in registers, four do not
        unreceived = e if RECEIVES == 2 else x
        d_rows *= weight_memory.load(by_key)[None, :]
        delta = factor * (factor * gl.sum(unreceived * d_rows, 1))  # the square may overflow
        fence_async_shared()  # so that the weights are loaded anew, not kept in registers
        d_logits = unreceived * (
            d_rows * factor[:, None] - delta[:, None] * weight_memory.load(by_key)[None, :]
        )
    if RECEIVES:
        column_sums(d_logits, partial_memory, sums_memory)
    tl.debug_barrier()  # also: both halves of dV have read the map
    if RECEIVES == 2:
        d_message = -x * sums_memory.load(by_key)[None, :]
    elif RECEIVES:
        d_message = x * (d_logits - sums_memory.load(by_key)[None, :])
    else:
        d_message = x * d_logits
    strength_grad = gl.sum(d_message, 1) * inverse
    if STRIDE > 1:
        sends = gl.where(rows % STRIDE == 0, share, 0.0)
        slope *= sends
    if GAPS or STRIDE > 1:
        strength_grad *= sends
    gl.store(strength_grad_base + rows, strength_grad, mask=rows < length)
    along = gamma * inverse * strength_grad
    d_scores = d_logits + slope[:, None] * d_message - along[:, None] * e
    map_memory.store(d_scores.to(KIND))
    fence_async_shared()
    tl.debug_barrier()

    dq = warpgroup_mma(map_memory, k, no_states, use_acc=False, is_async=True)
    dk = warpgroup_mma(map_memory.permute((1, 0)), q, no_states, use_acc=False, is_async=True)
    tma_store(dv_map, [batch, head, 0, 0], reinterpret(dv_memory, KIND, [1, 1, KEYS, DIM], dv_map.layout))
    dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
    dq_memory.store((dq * scale).to(KIND))
    dk_memory.store((dk * scale).to(KIND))


@gluon.jit(do_not_specialize=["lines"])
def short_hopper_backward(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, seed_ptr, lse_ptr, strength_ptr, key_part_ptr,
    dq_ptr, dk_ptr, dv_ptr, strength_grad_ptr, totals_ptr,
    q_map, k_map, v_map, grad_map, dq_map, dk_map, dv_map,
    heads, group, length, lines, scale, score_scale, drop_threshold, keep_scale, share,
    sign, r0, r1, r2, l0, l1, l2,
    TAIL: tl.constexpr, RECEIVES: tl.constexpr, WEAK: tl.constexpr, CAREFUL: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of several heads, and the gradient of each head's gamma per row, as ``short.short_backward``.

    STRIDE above 1, without padding: every STRIDE-th row sends messages, which count ``share`` times.
    """
    KIND: tl.constexpr = q_map.dtype
    q_memory = gl.allocate_shared_memory(KIND, [2, 1, 1, KEYS, DIM], q_map.layout)
    k_memory = gl.allocate_shared_memory(KIND, [2, 1, 1, KEYS, DIM], k_map.layout)
    v_memory = gl.allocate_shared_memory(KIND, [2, 1, 1, KEYS, DIM], v_map.layout)
    g_memory = gl.allocate_shared_memory(KIND, [2, 1, 1, KEYS, DIM], grad_map.layout)
    map_memory = gl.allocate_shared_memory(KIND, [KEYS, KEYS], tile_layout())
    dq_memory = gl.allocate_shared_memory(KIND, [KEYS, DIM], tile_layout())
    dk_memory = gl.allocate_shared_memory(KIND, [KEYS, DIM], tile_layout())
    dv_memory = gl.allocate_shared_memory(KIND, [KEYS, DIM], tile_layout())
    weight_memory = gl.allocate_shared_memory(gl.float32, [KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    partial_memory = gl.allocate_shared_memory(
        gl.float32, [gl.num_warps(), KEYS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    sums_memory = gl.allocate_shared_memory(gl.float32, [KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    fence_async_shared()

    # Concurrent programs process adjacent heads, whose states are adjacent in memory.
    first, step = gl.program_id(0), gl.num_programs(0)
    count = (lines - first + step - 1) // step
    mbarrier.expect(ready.index(0), 4 * TILE_BYTES)
    if count > 1:
        mbarrier.expect(ready.index(1), 4 * TILE_BYTES)
    tl.debug_barrier()
    for turn in gl.static_range(2):
        if turn < count:
            batch, head, key_head = place(first + turn * step, heads, group)
            fetch_states(
                q_map, k_map, v_map, grad_map, batch, head, key_head, q_memory.index(turn), k_memory.index(turn),
                v_memory.index(turn), g_memory.index(turn), ready.index(turn),
            )  # fmt: skip

    for turn in range(count):
        half = turn & 1
        batch, head, _ = place(first + turn * step, heads, group)
        row_base = (batch.to(gl.int64) * heads + head) * length
        q = reinterpret(q_memory.index(half), KIND, [KEYS, DIM], tile_layout())
        k = reinterpret(k_memory.index(half), KIND, [KEYS, DIM], tile_layout())
        v = reinterpret(v_memory.index(half), KIND, [KEYS, DIM], tile_layout())
        g = reinterpret(g_memory.index(half), KIND, [KEYS, DIM], tile_layout())
        head_gradients(
            q, k, v, g, map_memory, dq_memory, dk_memory, dv_memory, weight_memory, partial_memory, sums_memory, ready.index(half), (turn >> 1) & 1,
            dv_map, batch, head, mask_ptr + batch.to(gl.int64) * length, seed_ptr, lse_ptr + row_base, strength_ptr,
            key_part_ptr + row_base, strength_grad_ptr + row_base, totals_ptr + row_base, row_base,
            length, scale, score_scale, drop_threshold, keep_scale, share, sign, r0, r1, r2, l0, l1, l2,
            KIND, TAIL, RECEIVES, WEAK, MASKED, DROPS, STRIDE, CAREFUL,
        )  # fmt: skip
        more = turn + 2 < count
        if more:
            mbarrier.expect(ready.index(half), 4 * TILE_BYTES)
        fence_async_shared()
        tl.debug_barrier()  # both products that read the states are done
        if more:
            next_batch, next_head, next_key_head = place(first + (turn + 2) * step, heads, group)
            fetch_states(
                q_map, k_map, v_map, grad_map, next_batch, next_head, next_key_head, q_memory.index(half),
                k_memory.index(half), v_memory.index(half), g_memory.index(half), ready.index(half),
            )  # fmt: skip
        store_both(dq_map, dk_map, batch, head, dq_memory, dk_memory, KIND)
    tma.store_wait(0)


@gluon.jit
def store_both(dq_map, dk_map, batch, head, dq_memory, dk_memory, KIND: tl.constexpr):
    """Starts the way of dQ and dK to memory."""
    dq = reinterpret(dq_memory, KIND, [1, 1, KEYS, DIM], dq_map.layout)
    dk = reinterpret(dk_memory, KIND, [1, 1, KEYS, DIM], dk_map.layout)
    tma_store(dq_map, [batch, head, 0, 0], dq)
    tma_store(dk_map, [batch, head, 0, 0], dk)

# mypy: ignore-errors
"""``short_weak_forward`` for Hopper: a program processes several heads, and TMA prefetches the next one.

The arithmetic is that of ``short_weak``. Queries and keys are single-buffered in shared memory: once the scores of a head are
computed, the next head's are fetched into the same buffers. Its values are fetched with them, into the other of two buffers.
So two programs share a multiprocessor.

If a row's normaliser is too small for products of weights, which is rare, the program computes its heads again in the log domain.
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

from saobp.kernels.bidirectional.short import LOWEST, careful_rows
from saobp.kernels.bidirectional.short_weak import inverse_or_zero, real_or, store_lse
from saobp.kernels.hopper.head_tiles import (
    COLUMNS,
    DIM,
    fetch,
    narrow_layout,
    next_place,
    place,
    product_layout,
    row_sums_of,
    tile_layout,
)
from saobp.kernels.library.arithmetic import head_message, head_seed, kept
from saobp.kernels.library.gluon_names import reinterpret, tma_store
from saobp.kernels.library.packed_bf16 import messages_and_weights, multiply, pair_logarithm

KEYS = tl.constexpr(128)
TILE_BYTES = tl.constexpr(2 * 128 * 64)
_POWERS = (
    "{ .reg .f32 x, y; fma.rn.f32 x, $2, $4, $6; fma.rn.f32 y, $3, $5, $7;"
    " ex2.approx.ftz.f32 x, x; ex2.approx.ftz.f32 y, y; cvt.rn.f16x2.f32 $0, y, x;"
)
BOTH_POWERS = tl.constexpr(_POWERS + " cvt.rn.bf16x2.f32 $1, y, x; }")
FINE_POWERS = tl.constexpr(_POWERS + " mov.b32 $1, $0; }")
POWER_REGISTERS = tl.constexpr("=r,=r,f,f,f,f,f,f")
POLYNOMIAL = tl.constexpr(
    "{ .reg .b32 t, z; mov.b32 z, 0x80008000;"
    " fma.rn.f16x2 t, $1, $3, $2; fma.rn.f16x2 t, $1, t, z; fma.rn.f16x2 $0, $1, t, $1; }"
)
WRITTEN = tl.constexpr("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")
"""Assembly that waits until TMA's stores have reached memory."""
COARSE_POLYNOMIAL = tl.constexpr(POLYNOMIAL.value.replace("f16x2", "bf16x2"))


@gluon.jit
def barrier_pair():
    """Barriers that signal the ends of fetches, for every other head each."""
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    mbarrier.init(barriers.index(1), count=1)
    return barriers


@gluon.jit
def expect_states(q_ready, k_ready, v_ready, half):
    """Announces the fetch of a head's queries, keys and values."""
    mbarrier.expect(q_ready.index(half), TILE_BYTES)
    mbarrier.expect(k_ready.index(half), TILE_BYTES)
    mbarrier.expect(v_ready.index(half), TILE_BYTES)


@gluon.jit
def exponentials(raw, score_scale, high, KIND: tl.constexpr):
    """2^(raw score_scale - high) in float16 and in KIND.

    One block of assembly from two scores to both results: the compiler orders longer chains tile by tile, which needs
    too many registers.
    """
    operands = [raw, score_scale, -high]
    if KIND.is_fp16():
        return gl.inline_asm_elementwise(
            FINE_POWERS, POWER_REGISTERS, operands, (gl.float16, gl.float16), True, 2
        )
    else:
        return gl.inline_asm_elementwise(
            BOTH_POWERS, POWER_REGISTERS, operands, (gl.float16, gl.bfloat16), True, 2
        )


@gluon.jit
def polynomial(e, slope, bend, inverse):
    """As ``short_weak.polynomial``, in one block of assembly."""
    slope = (slope * inverse).to(e.dtype)[:, None]
    bend = (bend * inverse * inverse).to(e.dtype)[:, None]
    operands = [e, slope, bend]
    if e.dtype == gl.float16:
        return gl.inline_asm_elementwise(POLYNOMIAL, "=r,r,r,r", operands, gl.float16, True, 2)
    else:
        return gl.inline_asm_elementwise(COARSE_POLYNOMIAL, "=r,r,r,r", operands, gl.bfloat16, True, 2)


@gluon.jit
def prior_rows(raw, bound, score_scale, KIND: tl.constexpr, GAPS: tl.constexpr):
    """As ``short_weak.prior_rows``, from given scores."""
    if GAPS:
        raw = gl.minimum(raw, bound[None, :])
    high = gl.max(raw, 1) * score_scale
    if GAPS:
        high = gl.where(high > float("-inf"), high, 0.0)
    fine, coarse = exponentials(raw, score_scale, high[:, None], KIND)
    by_row: tl.constexpr = gl.SliceLayout(1, product_layout(KEYS, gl.num_warps()))
    total = row_sums_of(fine)
    # The second sum is unused. It forces the compiler to round now; otherwise float32 would stay live.
    total = gl.convert_layout(total + 0.0 * row_sums_of(coarse), by_row)
    return fine, coarse, high, total


@gluon.jit
def strong_rows(
    raw, bound, score_scale, gamma, sends,
    KIND: tl.constexpr, RECEIVES: tl.constexpr, GAPS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """For any strength: messages of pairs of rows, refined weights without the keys' factors, largest scores and sums."""
    if GAPS:
        raw = gl.minimum(raw, bound[None, :])
    high = gl.max(raw, 1) * score_scale
    if GAPS:
        high = gl.where(high > float("-inf"), high, 0.0)
    e = gl.exp2(raw * score_scale - high[:, None])
    total = gl.sum(e, 1)
    slope = gamma * inverse_or_zero(total, GAPS)
    if GAPS or STRIDE > 1:
        slope *= sends
    sent, refined = messages_and_weights(e, slope, KIND, RECEIVES == 2)
    return sent, gl.convert_layout(refined, product_layout(KEYS, gl.num_warps())), high, total


@gluon.jit
def store_messages(messages, factors, fine, inverse, message):
    """Stores log messages in shared memory, and the factors of ``short_weak.add_log_messages`` that normalise them."""
    unit, slope, bend = pair_logarithm(message)
    messages.store(polynomial(fine, slope.to(gl.float32), bend.to(gl.float32), inverse))
    narrow: tl.constexpr = narrow_layout(gl.num_warps())
    exact = gl.convert_layout(inverse, gl.SliceLayout(1, narrow))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, narrow))[None, :]
    near = exact.to(gl.float16)
    left = (exact - near.to(gl.float32)).to(gl.float16)
    factors.store(gl.where(column == 0, near, gl.where(column == 1, left, 0.0)))


@gluon.jit
def boosted_rows(coarse, inverse, message):
    """As ``short_weak.boosted_rows``."""
    gamma, r0, r1, r2, l0, l1, l2 = message
    return polynomial(coarse, r1 / r0, r2 / r0, inverse)


@gluon.jit
def key_weights(
    sums, memory, key_part_base, mask_base, length, message, share,
    STRONG: tl.constexpr, MASKED: tl.constexpr, GAPS: tl.constexpr, SAVES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Weights of keys from their log-message sums. Each warp takes all keys: no reduction across warps for the largest."""
    spread: tl.constexpr = gl.BlockedLayout([KEYS // 32], [32], [gl.num_warps()], [0])
    if STRONG:
        memory.store(gl.max(sums, 1))
        message_sums = memory.load(spread)
    else:
        memory.store(gl.sum(sums, 1))
        message_sums = memory.load(spread) * pair_logarithm(message)[0]
    if STRIDE > 1:
        message_sums *= share
    keys = gl.arange(0, KEYS, spread)
    if GAPS:
        message_sums = gl.minimum(
            message_sums, real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED)
        )
    peak = gl.max(message_sums, 0)
    message_sums -= gl.where(peak == float("-inf"), 0.0, peak)
    if SAVES:
        gl.store(key_part_base + keys, message_sums, mask=keys < length)
    return gl.exp2(message_sums)


@gluon.jit
def times_values(refined, v, factor):
    """Rows of the output. The product reads its first operand from registers, which must stay live until it is done."""
    ROWS: tl.constexpr = refined.shape[0]
    values: tl.constexpr = product_layout(DIM, gl.num_warps())
    refined = gl.convert_layout(refined, gl.DotOperandLayout(0, values, 2))
    nothing = gl.full([ROWS, DIM], 0.0, gl.float32, values)
    product = warpgroup_mma(refined, v, nothing, use_acc=False, is_async=True)
    product, _ = warpgroup_mma_wait(0, deps=(product, refined))
    return product * gl.convert_layout(factor, gl.SliceLayout(1, values))[:, None]


@gluon.jit(do_not_specialize=["lines"])
def short_hopper_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_ptr, seed_ptr, lse_ptr, strength_ptr, key_part_ptr,
    q_map, k_map, v_map, out_map,
    heads, group, length, lines, score_scale, drop_threshold, keep_scale, share,
    sign, r0, r1, r2, l0, l1, l2,
    TAIL: tl.constexpr, RECEIVES: tl.constexpr, STRONG: tl.constexpr, CAREFUL: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, SAVES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Output of several heads, and what the backward pass needs, as ``short_weak.short_weak_forward``.

    STRIDE above 1, with STRONG and without padding: every STRIDE-th row sends messages, which count ``share`` times.
    """
    WARPS: tl.constexpr = gl.num_warps()
    ROWS: tl.constexpr = 16 * WARPS
    PARTS: tl.constexpr = KEYS // ROWS
    GAPS: tl.constexpr = TAIL or MASKED
    KIND: tl.constexpr = q_map.dtype
    scores: tl.constexpr = product_layout(KEYS, WARPS)
    totals: tl.constexpr = product_layout(COLUMNS, WARPS)
    by_row: tl.constexpr = gl.SliceLayout(1, scores)
    by_key: tl.constexpr = gl.SliceLayout(0, scores)
    plain: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    q_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], q_map.layout)
    k_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], k_map.layout)
    v_memory = gl.allocate_shared_memory(KIND, [2, 1, 1, KEYS, DIM], v_map.layout)
    SENT: tl.constexpr = ROWS // 2 if STRONG else ROWS
    messages = gl.allocate_shared_memory(gl.float16, [SENT, KEYS], tile_layout())
    factors = gl.allocate_shared_memory(gl.float16, [COLUMNS, SENT], tile_layout(SENT)).permute((1, 0))
    if STRONG:
        factors.store(gl.full([SENT, COLUMNS], 1.0, gl.float16, narrow_layout(WARPS)))
    sums_memory = gl.allocate_shared_memory(gl.float32, [KEYS], plain)
    weight_memory = gl.allocate_shared_memory(KIND, [KEYS], plain)
    if STRONG:
        out_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], out_map.layout)
    else:  # in place of the messages, which are no longer needed: there is no room for both
        out_memory = reinterpret(messages, KIND, [SENT // DIM, 1, 1, KEYS, DIM], out_map.layout).index(0)
    q = reinterpret(q_memory, KIND, [KEYS, DIM], tile_layout())
    k = reinterpret(k_memory, KIND, [KEYS, DIM], tile_layout()).permute((1, 0))
    out = reinterpret(out_memory, KIND, [KEYS, DIM], tile_layout())
    # One for each fetch: the compiler would separate those that share one by barriers of the whole program.
    q_ready, k_ready, v_ready = barrier_pair(), barrier_pair(), barrier_pair()
    fence_async_shared()

    lowest = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, narrow_layout(WARPS)))
    # Concurrent programs process adjacent heads, whose states are adjacent in memory.
    first, step = gl.program_id(0), gl.num_programs(0)
    count = (lines - first + step - 1) // step
    batch_step, head_step, _ = place(step, heads, group)
    batch, head, key_head = place(first, heads, group)
    expect_states(q_ready, k_ready, v_ready, 0)
    if count > 1:
        expect_states(q_ready, k_ready, v_ready, 1)
    tl.debug_barrier()
    fetch(q_map, batch, head, q_memory, q_ready.index(0))
    fetch(k_map, batch, key_head, k_memory, k_ready.index(0))
    fetch(v_map, batch, key_head, v_memory.index(0), v_ready.index(0))
    tl.debug_barrier()

    for turn in range(count):
        half = turn & 1
        other = 1 - half
        keys = gl.arange(0, KEYS, by_key)
        sums = gl.full([KEYS, COLUMNS], 0.0, gl.float32, totals)
        waiting = ()
        mbarrier.wait(q_ready.index(half), (turn >> 1) & 1)
        mbarrier.wait(k_ready.index(half), (turn >> 1) & 1)
        for part in gl.static_range(PARTS):
            nothing = gl.full([ROWS, KEYS], 0.0, gl.float32, scores)
            raw = warpgroup_mma(q.slice(part * ROWS, ROWS), k, nothing, use_acc=False, is_async=True)
            if part == 0:  # beside the product
                next_batch, next_head = next_place(batch, head, batch_step, head_step, heads)
                row_base = (batch.to(gl.int64) * heads + head) * length
                mask_base = mask_ptr + batch.to(gl.int64) * length
                message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
                bound = real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED)
            # Also waits for the previous part's sums. After the barrier messages may be overwritten.
            raw = warpgroup_mma_wait(0, deps=(raw,))
            if part == 0 and not (STRONG and RECEIVES):
                tma.store_wait(0)
            tl.debug_barrier()
            if part == PARTS - 1 and turn + 1 < count:
                fetch(q_map, next_batch, next_head, q_memory, q_ready.index(other))
                fetch(k_map, next_batch, next_head // group, k_memory, k_ready.index(other))
                fetch(v_map, next_batch, next_head // group, v_memory.index(other), v_ready.index(other))
            rows = part * ROWS + gl.arange(0, ROWS, by_row)
            if STRONG:
                sends = real_or(mask_base, rows, length, 1.0, 0.0, MASKED) if GAPS else 1.0
                if STRIDE > 1:
                    sends *= gl.where(rows % STRIDE == 0, 1.0, 0.0)
                fine, coarse, high, total = strong_rows(
                    raw, bound, score_scale, message[0], sends, KIND, RECEIVES, GAPS, STRIDE
                )
            else:
                fine, coarse, high, total = prior_rows(raw, bound, score_scale, KIND, GAPS)
            if part == PARTS - 1:
                mbarrier.wait(v_ready.index(half), (turn >> 1) & 1)
            if SAVES:
                store_lse(lse_ptr + row_base, rows, length, high, total, GAPS)
            if STRONG:
                messages.store(fine)
            else:
                inverse = inverse_or_zero(total, GAPS)
                if GAPS:
                    inverse *= real_or(mask_base, rows, length, 1.0, 0.0, MASKED)
                if RECEIVES:
                    store_messages(messages, factors, fine, inverse, message)
                if RECEIVES != 2:
                    coarse = boosted_rows(coarse, inverse, message)
            if RECEIVES:
                fence_async_shared()
                if STRONG and part == PARTS - 1:
                    tma.store_wait(0)  # after the barrier the output's memory may be overwritten
                tl.debug_barrier()
                sums = warpgroup_mma(messages.permute((1, 0)), factors, sums, use_acc=part > 0, is_async=True)
            waiting += (coarse,)

        if RECEIVES:
            sums = warpgroup_mma_wait(0, deps=(sums,))
            weight = key_weights(
                sums, sums_memory, key_part_ptr + row_base, mask_base, length, message, share,
                STRONG, MASKED, GAPS, SAVES or STRONG, STRIDE,
            )  # fmt: skip
            weight_memory.store(weight.to(KIND))
            weight = weight_memory.load(by_key)
        v = reinterpret(v_memory.index(half), KIND, [KEYS, DIM], tile_layout())
        for part in gl.static_range(PARTS):
            refined = waiting[part]
            if RECEIVES:
                refined = multiply(refined, weight[None, :])
            total = row_sums_of(refined)
            if CAREFUL:
                lowest = gl.minimum(lowest, total)
            factor = keep_scale * inverse_or_zero(total, GAPS)
            if DROPS:
                rows = part * ROWS + gl.arange(0, ROWS, by_row)
                seed = head_seed(seed_ptr, row_base, DROPS)
                refined = gl.where(kept(seed, rows[:, None], keys[None, :], drop_threshold), refined, 0.0)
            out.slice(part * ROWS, ROWS).store(times_values(refined, v, factor).to(KIND))
        if turn + 2 < count:
            expect_states(q_ready, k_ready, v_ready, half)
        fence_async_shared()
        tl.debug_barrier()
        tma_store(out_map, [batch, head, 0, 0], out_memory)
        batch, head = next_batch, next_head
    if CAREFUL:  # noqa: SIM102 - Triton would evaluate both sides of "and"
        if -gl.max(-lowest, 0) < LOWEST:
            gl.inline_asm_elementwise(WRITTEN, "=f,f", [lowest], gl.float32, False, 1)
            for turn in range(count):
                half = (count + turn) & 1
                v = reinterpret(v_memory.index(half), KIND, [KEYS, DIM], tile_layout())
                batch, head, key_head = place(first + turn * step, heads, group)
                tma.store_wait(0)
                expect_states(q_ready, k_ready, v_ready, half)
                tl.debug_barrier()
                fetch(q_map, batch, head, q_memory, q_ready.index(half))
                fetch(k_map, batch, key_head, k_memory, k_ready.index(half))
                fetch(v_map, batch, key_head, v_memory.index(half), v_ready.index(half))
                row_base = (batch.to(gl.int64) * heads + head) * length
                mask_base = mask_ptr + batch.to(gl.int64) * length
                gamma = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)[0]
                keys = gl.arange(0, KEYS, by_key)
                bound = real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED)
                message_sums = gl.load(
                    key_part_ptr + row_base + keys, mask=keys < length, other=float("-inf")
                )
                mbarrier.wait(q_ready.index(half), ((count + turn) >> 1) & 1)
                mbarrier.wait(k_ready.index(half), ((count + turn) >> 1) & 1)
                mbarrier.wait(v_ready.index(half), ((count + turn) >> 1) & 1)
                for part in gl.static_range(PARTS):
                    rows = part * ROWS + gl.arange(0, ROWS, by_row)
                    nothing = gl.full([ROWS, KEYS], 0.0, gl.float32, scores)
                    raw = warpgroup_mma(q.slice(part * ROWS, ROWS), k, nothing, use_acc=False, is_async=True)
                    raw = warpgroup_mma_wait(0, deps=(raw,))
                    sends = real_or(mask_base, rows, length, 1.0, 0.0, MASKED)
                    refined = careful_rows(
                        raw, bound, sends, message_sums, score_scale, gamma, GAPS, RECEIVES
                    ).to(KIND)
                    factor = keep_scale * inverse_or_zero(row_sums_of(refined), GAPS)
                    if DROPS:
                        seed = head_seed(seed_ptr, row_base, DROPS)
                        refined = gl.where(
                            kept(seed, rows[:, None], keys[None, :], drop_threshold), refined, 0.0
                        )
                    out.slice(part * ROWS, ROWS).store(times_values(refined, v, factor).to(KIND))
                fence_async_shared()
                tl.debug_barrier()
                tma_store(out_map, [batch, head, 0, 0], out_memory)
    tma.store_wait(0)

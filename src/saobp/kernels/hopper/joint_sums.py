# mypy: ignore-errors
"""Row and key sums of ``bidirectional/sums.py`` in one launch on Hopper, from scores computed once.

Correct for 257 to 512 tokens; used from 449 on, since it always has 512 keys and separate sweeps are faster for fewer.

A program of sixteen warps takes a head's blocks of 64 rows in turn. Four groups of four warps have all rows of a block and, of each
half of the keys, a quarter: 64 entries in a thread's registers, in float32 from score to message. Messages are multiplied, not
added: a thread has sixteen rows of a key in all, so it takes the logarithm of its product once for a head (more often if
``is_strong``). For any strength, with no polynomials.

The groups exchange each row's largest score and sum of exponentials through shared memory. Largest scores are rounded to
integers, so the factors between them are exact powers of two, made by integer arithmetic.
TMA fetches queries two blocks ahead, and the keys of the next head.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from saobp.kernels.bidirectional.short_weak import inverse_or_zero, real_or
from saobp.kernels.hopper.head_tiles import DIM, new_barrier, place, tile_layout
from saobp.kernels.library.arithmetic import _hardware_log2, head_message
from saobp.kernels.library.gluon_names import reinterpret, tma_load
from saobp.kernels.library.packed_bf16 import row_pairs

KEYS = tl.constexpr(512)
HALF = tl.constexpr(256)
ROWS = tl.constexpr(64)
GROUPS = tl.constexpr(4)
"""Groups of four warps, which share the rows and split the keys."""
BLOCKS = tl.constexpr(8)
K_BYTES = tl.constexpr(2 * 512 * 64)
Q_BYTES = tl.constexpr(2 * 64 * 64)
ROUND = tl.constexpr(1.5 * 2**23)
"""Added and subtracted again, rounds to an integer."""
LOWEST = tl.constexpr(-1e30)
"""In place of the largest score of no key."""
LARGEST_GAMMA = tl.constexpr(1 - 2.0**-22)
"""Of a strength of 15.2. Leaves messages above 0 where rounding makes a weight a little more than 1."""
EXPONENT = tl.constexpr(2.0**23 + 127)
"""Added to an integer from -127 to 127, has the exponent bits of 2 to its power as its lowest bits."""


@gluon.constexpr_function
def scores_layout():
    """Register layout of the products ``[rows, keys]`` of half of the keys."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 4], instr_shape=[16, 64, 16])


@gluon.constexpr_function
def exchange_layout():
    """Two numbers of each group of warps for each row: four adjacent threads, which share rows in ``scores_layout``, have
    a group each."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 4], instr_shape=[16, 8, 16])


@gluon.constexpr_function
def rows_layout():
    """Shared-memory layout of numbers of rows."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.constexpr_function
def eights_layout():
    """Register layout of ``[keys / 8, row pairs, 8]``."""
    return gl.BlockedLayout([4, 8, 1], [1, 4, 8], [16, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def key_layout():
    """A key for each thread, with all its sums."""
    return gl.BlockedLayout([1, 1], [1, 32], [1, 16], [1, 0])


@gluon.jit
def start_scores(q, k):
    """Starts the products of a block's rows with half of the keys."""
    nothing = gl.full([ROWS, HALF], 0.0, gl.float32, scores_layout())
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def by_group(tile):
    """``[rows, groups, keys]`` of a tile ``[rows, keys]``."""
    return tl.reshape(tile, [ROWS, GROUPS, HALF // GROUPS])


@gluon.jit
def of_keys(numbers):
    """``[rows, groups]`` as factors of a tile ``[rows, keys]``."""
    spread = tl.reshape(tl.broadcast_to(numbers[:, :, None], [ROWS, GROUPS, HALF // GROUPS]), [ROWS, HALF])
    return gl.convert_layout(spread, scores_layout())


@gluon.jit
def power_of_integer(x):
    """2^x of integers up to 127; 0 below -126."""
    bits = (gl.maximum(x, -127.0) + EXPONENT).to(tl.int32, bitcast=True) << 23
    return bits.to(tl.float32, bitcast=True)


@gluon.jit
def rounded_top(raw, score_scale, MASKED: tl.constexpr):
    """Each group's largest score of a row, rounded to an integer; very low where all its keys are padding."""
    top = gl.max(by_group(raw), 2) * score_scale
    if MASKED:
        top = gl.maximum(top, LOWEST)
    return (top + ROUND) - ROUND


@gluon.jit
def shown(raw, bounds, GAPS: tl.constexpr):
    """Products of half of the keys; minus infinity for missing ones."""
    if GAPS:
        raw = gl.minimum(raw, bounds.load(gl.SliceLayout(0, scores_layout()))[None, :])
    return raw


@gluon.jit
def exponentials(raw, top, score_scale):
    """Exponentials relative to a group's largest score, and their sums ``[rows, groups]``."""
    e = gl.exp2(raw * score_scale - of_keys(top))
    return e, gl.sum(by_group(e), 2)


@gluon.jit
def multiplied(products, e, slope):
    """Products of messages ``[row pairs, keys]``, times those of a block's rows."""
    upper, lower = row_pairs(1.0 - slope * e)
    return products * upper * lower


@gluon.jit
def row_totals(exchanged):
    """Each row's largest score and sum of exponentials relative to it, from those of all groups."""
    by_row: tl.constexpr = gl.SliceLayout(1, scores_layout())
    top, sums = tl.split(tl.reshape(exchanged.load(exchange_layout()), [ROWS, GROUPS, 2]))
    highest = gl.max(top, 1)
    total = gl.sum(sums * power_of_integer(top - highest[:, None]), 1)
    return gl.convert_layout(highest, by_row), gl.convert_layout(total, by_row)


@gluon.jit
def fetch_keys(k_map, batch, key_head, memory, ready, buffer):
    """Starts the TMA fetch of a head's keys."""
    for half in gl.static_range(2):
        into = memory.index(2 * buffer + half)
        tma_load(k_map, [batch, key_head, half * HALF, 0], ready.index(buffer), into)


@gluon.jit
def is_strong(gamma):
    """Whether a product of sixteen messages may leave the range of float32; that of four never does."""
    return (gamma > 0.99) | (gamma < -100.0)


@gluon.jit
def ones_of_pairs():
    """Products of no messages."""
    return row_pairs(gl.full([ROWS, HALF], 1.0, gl.float32, scores_layout()))[0]


@gluon.jit
def put_logarithms(products, memory):
    """Base-2 logarithms of ``[row pairs, keys]`` as ``[keys / 8, row pairs, 8]``, in which a warp writes adjacent numbers."""
    eights = tl.reshape(_hardware_log2(products), [ROWS // 2, HALF // 8, 8])
    memory.store(tl.permute(eights, (1, 0, 2)))


@gluon.jit
def key_sums(products, products_2, memory):
    """Log-message sums of keys, from the threads' products."""
    put_logarithms(products, memory.slice(0, HALF // 8))
    put_logarithms(products_2, memory.slice(HALF // 8, HALF // 8))
    return tl.reshape(gl.sum(memory.load(eights_layout()), 1), [KEYS])


@gluon.jit
def write_bounds(bounds, mask_base, length, MASKED: tl.constexpr):
    """Plus infinity for keys, minus infinity for padding and beyond the sequence."""
    keys = gl.arange(0, KEYS, gl.SliceLayout(0, key_layout()))
    bounds.store(real_or(mask_base, keys, length, float("inf"), float("-inf"), MASKED))


@gluon.jit
def add_block(
    block, places, products, products_2, q_map, q_memory, q_ready, keys, exchanged, rows_memory, bounds, mask_base, length,
    score_scale, gamma, GAPS: tl.constexpr, MASKED: tl.constexpr, PARITY: tl.constexpr,
):  # fmt: skip
    """Products of messages, times those of a block of rows; largest scores and sums of these go to ``rows_memory``.

    Then TMA fetches the rows that come two blocks later, or in the next head.
    """
    by_row: tl.constexpr = gl.SliceLayout(1, scores_layout())
    batch, head, next_batch, next_head, more = places
    tops, totals = rows_memory
    inside = block + 2 < (length + ROWS - 1) // ROWS
    q = reinterpret(q_memory, q_map.dtype, [ROWS, DIM], tile_layout())
    raw = warpgroup_mma_wait(0, deps=(start_scores(q, keys[0]),))
    running = start_scores(q, keys[1])
    raw = shown(raw, bounds.slice(0, HALF), MASKED)  # without a mask the first half has no missing keys
    first_top = rounded_top(raw, score_scale, MASKED)
    e, first_sum = exponentials(raw, first_top, score_scale)
    raw = shown(warpgroup_mma_wait(0, deps=(running,)), bounds.slice(HALF, HALF), GAPS)
    top = gl.maximum(first_top, rounded_top(raw, score_scale, MASKED))
    e_2, sums = exponentials(raw, top, score_scale)
    shrink = power_of_integer(first_top - top)
    sums += first_sum * shrink
    exchanged.store(tl.reshape(tl.join(top, sums), [ROWS, 2 * GROUPS]))
    if inside | more:
        mbarrier.expect(q_ready, Q_BYTES)
    tl.debug_barrier()  # sums of all groups are there, and all warps have used the queries
    if inside | more:
        row = gl.where(inside, block + 2, PARITY) * ROWS
        place_of_rows = [gl.where(inside, batch, next_batch), gl.where(inside, head, next_head), row, 0]
        tma_load(q_map, place_of_rows, q_ready, q_memory)
    row_top, total = row_totals(exchanged)
    tops.index(block).store(row_top)
    totals.index(block).store(total)
    inverse = gamma * inverse_or_zero(total, MASKED)
    if GAPS:
        rows = block * ROWS + gl.arange(0, ROWS, by_row)
        inverse *= real_or(mask_base, rows, length, 1.0, 0.0, MASKED)
    slope = power_of_integer(of_keys(top) - row_top[:, None]) * inverse[:, None]
    return multiplied(products, e, slope * of_keys(shrink)), multiplied(products_2, e_2, slope)


@gluon.jit(do_not_specialize=["lines"])
def joint_sums(
    q_ptr, k_ptr, mask_ptr, lse_ptr, strength_ptr, message_sums_ptr, weight_ptr,
    q_map, k_map,
    heads, group, length, lines, score_scale, sign, r0, r1, r2, l0, l1, l2,
    TAIL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of rows, log-message sums of keys less the largest, and weights of keys, of several heads."""
    GAPS: tl.constexpr = TAIL or MASKED
    KIND: tl.constexpr = q_map.dtype
    plain: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    by_key: tl.constexpr = gl.SliceLayout(0, key_layout())
    k_memory = gl.allocate_shared_memory(KIND, [4, 1, 1, HALF, DIM], k_map.layout)
    # Two of what blocks use by turns, by names of their own: for parts of one the compiler would add barriers.
    q_even = gl.allocate_shared_memory(KIND, [1, 1, ROWS, DIM], q_map.layout)
    q_odd = gl.allocate_shared_memory(KIND, [1, 1, ROWS, DIM], q_map.layout)
    exchanged_even = gl.allocate_shared_memory(gl.float32, [ROWS, 2 * GROUPS], rows_layout())
    exchanged_odd = gl.allocate_shared_memory(gl.float32, [ROWS, 2 * GROUPS], rows_layout())
    logs = gl.allocate_shared_memory(
        gl.float32, [KEYS // 8, ROWS // 2, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    tops = gl.allocate_shared_memory(gl.float32, [BLOCKS, ROWS], plain)
    totals = gl.allocate_shared_memory(gl.float32, [BLOCKS, ROWS], plain)
    bounds = gl.allocate_shared_memory(gl.float32, [KEYS], plain)
    k_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(k_ready.index(buffer), count=1)
    even_ready, odd_ready = new_barrier(), new_barrier()
    fence_async_shared()
    tl.debug_barrier()

    # Concurrent programs process adjacent heads, whose states are adjacent in memory.
    first, step = gl.program_id(0), gl.num_programs(0)
    count = (lines - first + step - 1) // step
    blocks = (length + ROWS - 1) // ROWS
    batch, head, key_head = place(first, heads, group)
    mbarrier.expect(k_ready.index(0), K_BYTES)
    mbarrier.expect(even_ready, Q_BYTES)
    mbarrier.expect(odd_ready, Q_BYTES)
    tl.debug_barrier()
    fetch_keys(k_map, batch, key_head, k_memory, k_ready, 0)
    tma_load(q_map, [batch, head, 0, 0], even_ready, q_even)
    tma_load(q_map, [batch, head, ROWS, 0], odd_ready, q_odd)
    evens, odds = gl.to_tensor(0), gl.to_tensor(0)
    for turn in range(count):
        batch, head, _ = place(first + turn * step, heads, group)
        next_batch, next_head, next_key_head = place(first + (turn + 1) * step, heads, group)
        more = turn + 1 < count
        row_base = (batch.to(gl.int64) * heads + head) * length
        mask_base = mask_ptr + batch.to(gl.int64) * length
        gamma = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)[0]
        gamma = gl.minimum(gamma, LARGEST_GAMMA)
        strong = is_strong(gamma)
        if GAPS:
            write_bounds(bounds, mask_base, length, MASKED)
        if more:
            mbarrier.expect(k_ready.index((turn + 1) & 1), K_BYTES)
        tl.debug_barrier()  # all warps have used the previous head's keys
        if more:
            fetch_keys(k_map, next_batch, next_key_head, k_memory, k_ready, (turn + 1) & 1)
        keys = (
            reinterpret(k_memory.index(2 * (turn & 1)), KIND, [HALF, DIM], tile_layout()),
            reinterpret(k_memory.index(2 * (turn & 1) + 1), KIND, [HALF, DIM], tile_layout()),
        )
        products, products_2 = ones_of_pairs(), ones_of_pairs()
        message_sums = gl.full([KEYS], 0.0, gl.float32, by_key)
        mbarrier.wait(k_ready.index(turn & 1), (turn >> 1) & 1)
        tl.debug_barrier()  # nothing is left to be waited for inside the loop, where the compiler would
        places = (batch, head, next_batch, next_head, more)
        for block in range(0, blocks, 2):
            mbarrier.wait(even_ready, evens & 1)
            evens += 1
            products, products_2 = add_block(
                block, places, products, products_2, q_map, q_even, even_ready, keys, exchanged_even, (tops, totals), bounds,
                mask_base, length, score_scale, gamma, GAPS, MASKED, 0,
            )  # fmt: skip
            if block + 1 < blocks:
                mbarrier.wait(odd_ready, odds & 1)
                odds += 1
                products, products_2 = add_block(
                    block + 1, places, products, products_2, q_map, q_odd, odd_ready, keys, exchanged_odd, (tops, totals),
                    bounds, mask_base, length, score_scale, gamma, GAPS, MASKED, 1,
                )  # fmt: skip
            else:
                tl.debug_barrier()  # all warps have what was exchanged
            if (block + 2 >= blocks) | strong:
                message_sums += gl.convert_layout(key_sums(products, products_2, logs), by_key)
                products, products_2 = ones_of_pairs(), ones_of_pairs()

        positions = gl.arange(0, KEYS, by_key)
        total = reinterpret(totals, gl.float32, [KEYS], plain).load(by_key)
        lse = reinterpret(tops, gl.float32, [KEYS], plain).load(by_key) + _hardware_log2(total)
        if MASKED:
            lse = gl.where(total > 0, lse, float("inf"))
        gl.store(lse_ptr + row_base + positions, lse, mask=positions < length)
        if GAPS:
            message_sums = gl.minimum(message_sums, bounds.load(by_key))
        peak = gl.max(message_sums, 0)
        message_sums -= gl.where(peak == float("-inf"), 0.0, peak)
        weight = gl.exp2(message_sums)
        gl.store(message_sums_ptr + row_base + positions, message_sums, mask=positions < length)
        gl.store(
            weight_ptr + row_base + positions, weight.to(weight_ptr.dtype.element_ty), mask=positions < length
        )

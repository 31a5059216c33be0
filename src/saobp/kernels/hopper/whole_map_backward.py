# mypy: ignore-errors
"""129 to 256 tokens on Hopper, backward: a program has all states of a head in shared memory and sweeps its map twice.

Notation of ``bidirectional/backward.py``; n is one over a row's normaliser. dO times n, rounded, replaces dO, and D is of that.

1. ``value_sweep``, in tiles ``[keys, rows]``: u, rounded, stays in registers as first operand of dV = P^T dO and of P^T D, and
   dc = V . dV - P^T D. A warp has whole keys, so warps do not wait for one another.
2. ``block_terms``, in tiles ``[rows, keys]`` of 64 rows and all keys: E, t and dS in float32, dS rounded once, for dQ = dS K and
   dK = dS^T Q. dK stays in registers from block to block.

So there are six products of the map's size and two exponentials an entry, where the three sweeps of ``bidirectional/`` have eight
and three. Messages are exact: the kernel is for any strength, and the one for weak ones would not be shorter.

Heads are dealt out to one program per multiprocessor. TMA fetches the next head's states where shared memory
becomes free: keys have two buffers, O comes before the values into theirs, queries and dO follow block by block.
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

from saobp.kernels.bidirectional.gradient_terms import closeness
from saobp.kernels.bidirectional.short_weak import real_or
from saobp.kernels.hopper.entry_gradients import entry_gradients
from saobp.kernels.hopper.head_tiles import fetch, new_barrier, place, product_layout, tile_layout
from saobp.kernels.hopper.row_numbers import (
    COLUMNS,
    DIM,
    KEYS,
    all_blocks,
    load_row_numbers,
    prefetch_row_numbers,
    store_numbers,
)
from saobp.kernels.library.arithmetic import INTERPRETED, head_message, over_message
from saobp.kernels.library.gluon_names import reinterpret, tma_load, tma_store
from saobp.kernels.library.packed_bf16 import rounded

ROWS = tl.constexpr(64)
BLOCKS = tl.constexpr(4)
TILE_BYTES = tl.constexpr(2 * 256 * 64)


@gluon.constexpr_function
def block_layout(columns, warps):
    """Register layout of ``[64, columns]``, the columns shared out among warpgroups."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, warps // 4], instr_shape=[16, 4 * columns // warps, 16]
    )


@gluon.jit
def anew(number):
    """The same number, hidden from the compiler, which would otherwise keep addresses that follow from it in registers."""
    if INTERPRETED:
        return number
    else:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], gl.int32, False, 1)


@gluon.jit
def value_sweep(
    q_blocks, k, g_blocks, parts, vectors, score_scale,
    KIND: tl.constexpr, RECEIVES: tl.constexpr, GAPS: tl.constexpr,
):  # fmt: skip
    """dV and P^T D of all keys, but for the keys' factors."""
    WARPS: tl.constexpr = gl.num_warps()
    tiles: tl.constexpr = product_layout(ROWS, WARPS)
    operand: tl.constexpr = gl.DotOperandLayout(0, tiles, 2)
    by_row: tl.constexpr = gl.SliceLayout(0, tiles)
    highs, gammas, _inverses, _deltas, _weights, bounds = vectors
    dv = gl.full([KEYS, DIM], 0.0, gl.float32, tiles)
    own = gl.full([KEYS, COLUMNS], 0.0, gl.float32, product_layout(COLUMNS, WARPS))
    nothing = gl.full([KEYS, ROWS], 0.0, gl.float32, tiles)
    for block in gl.static_range(BLOCKS):
        q = reinterpret(q_blocks.index(block), KIND, [ROWS, DIM], tile_layout())
        g = reinterpret(g_blocks.index(block), KIND, [ROWS, DIM], tile_layout())
        raw = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
        raw = warpgroup_mma_wait(0, deps=(raw,))
        if GAPS:
            raw = gl.minimum(raw, all_blocks(bounds).load(gl.SliceLayout(1, tiles))[:, None])
        weights = gl.exp2(raw * score_scale - highs.index(block).load(by_row)[None, :])
        if RECEIVES == 1:
            weights = over_message(weights, gammas.index(block).load(by_row)[None, :])
        weights = rounded(weights, KIND)
        left = gl.convert_layout(weights, operand)
        own = warpgroup_mma(left, parts.slice(block * ROWS, ROWS), own, use_acc=block > 0, is_async=True)
        dv = warpgroup_mma(left, g, dv, use_acc=block > 0, is_async=True)
        dv, own, _ = warpgroup_mma_wait(0, deps=(dv, own, left))
    return dv, gl.convert_layout(gl.sum(own, 1), gl.SliceLayout(1, tiles))


@gluon.jit
def block_terms(
    q, k, v, g, vectors, sums_grads, sums_memory, block, score_scale,
    RECEIVES: tl.constexpr, SHARES: tl.constexpr, GAPS: tl.constexpr,
):  # fmt: skip
    """a and dT + gamma H of a block of rows; ``entry_gradients``' sums in ``sums_memory``, by warpgroup."""
    WARPS: tl.constexpr = gl.num_warps()
    PARTS: tl.constexpr = WARPS // 4
    maps: tl.constexpr = block_layout(KEYS, WARPS)
    by_row: tl.constexpr = gl.SliceLayout(1, maps)
    by_key: tl.constexpr = gl.SliceLayout(0, maps)
    highs, gammas, _inverses, deltas, weights, bounds = vectors
    nothing = gl.full([ROWS, KEYS], 0.0, gl.float32, maps)
    raw = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    d_rows = warpgroup_mma(g, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
    raw, d_rows = warpgroup_mma_wait(0, deps=(raw, d_rows))
    if GAPS:
        raw = gl.minimum(raw, all_blocks(bounds).load(by_key)[None, :])
    a, d_scores, sums = entry_gradients(
        raw, d_rows, score_scale, highs.index(block).load(by_row), gammas.index(block).load(by_row),
        deltas.index(block).load(by_row), all_blocks(weights).load(by_key), sums_grads.load(by_key), RECEIVES, SHARES, PARTS,
    )  # fmt: skip
    rows_last: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    by_part = reinterpret(sums_memory, gl.float32, [sums.shape[1], ROWS], rows_last)
    by_part.permute((1, 0)).store(sums)
    return a, d_scores


@gluon.jit
def sum_over_keys(sums_memory, which: tl.constexpr, SUMS: tl.constexpr):
    """The parts' sums of number ``which`` of SUMS."""
    by_row: tl.constexpr = gl.SliceLayout(1, block_layout(KEYS, gl.num_warps()))
    total = sums_memory.index(which).load(by_row)
    for part in gl.static_range(gl.num_warps() // 4 - 1):
        total += sums_memory.index(SUMS * (part + 1) + which).load(by_row)
    return total


@gluon.jit
def row_term(sums_memory, vectors, block, SHARES: tl.constexpr):
    """The gradient of gamma, and t: gamma E and what D leaves unbalanced of rowsum(dT), as far as P lies along a.

    An error of D, from the rounded output, moves dT by as much times P, and E by about that times the other rows' priors of
    the keys on which P lies: one in all, unless P lies on keys of this row alone. So rowsum(dT), which is exactly 0, tells E's
    error, all rows of which add up in the gradient of gamma.
    """
    SUMS: tl.constexpr = 4 if SHARES else 2
    by_row: tl.constexpr = gl.SliceLayout(1, block_layout(KEYS, gl.num_warps()))
    gamma, inverse = vectors[1].index(block).load(by_row), vectors[2].index(block).load(by_row)
    strength_grad = sum_over_keys(sums_memory, 0, SUMS)
    excess = sum_over_keys(sums_memory, 1, SUMS)
    if SHARES:
        overlap = sum_over_keys(sums_memory, 2, SUMS) * inverse
        share = gl.minimum(overlap / gl.maximum(sum_over_keys(sums_memory, 3, SUMS), 1e-30), 1.0)
        excess *= share
        return strength_grad + excess * gl.maximum(1.0 - overlap, 0.0), gamma * strength_grad + excess
    else:
        return strength_grad, gamma * strength_grad + closeness(inverse) * excess


@gluon.jit
def fetch_block(maps, batch, head, block, memory, ready):
    """Starts the fetch of a block of rows of queries and dO, which their barriers expect already."""
    tma_load(maps[0], [batch, head, block * ROWS, 0], ready[0], memory[0].index(block))
    tma_load(maps[1], [batch, head, block * ROWS, 0], ready[1], memory[1].index(block))


@gluon.jit
def store_block(dq_map, batch, head, block, dq_memory):
    """Starts the store of a block of rows of dQ."""
    tma_store(dq_map, [batch, head, block * ROWS, 0], dq_memory.index(block & 1))


@gluon.jit(do_not_specialize=["lines"])
def whole_map_backward(
    q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, mask_ptr, strength_ptr, lse_ptr, message_sums_ptr, inverse_ptr,
    dq_ptr, dk_ptr, dv_ptr, strength_grad_ptr,
    q_map, k_map, v_map, grad_map, out_map, dq_map, dk_map, dv_map,
    heads, group, length, lines, scale, score_scale,
    sign, r0, r1, r2, l0, l1, l2,
    TAIL: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of several heads, and the gradient of each head's gamma per row."""
    WARPS: tl.constexpr = gl.num_warps()
    GAPS: tl.constexpr = TAIL or MASKED
    SHARES: tl.constexpr = PRECISE != 0
    KIND: tl.constexpr = q_map.dtype
    states: tl.constexpr = product_layout(DIM, WARPS)
    by_row: tl.constexpr = gl.SliceLayout(1, states)
    in_block: tl.constexpr = gl.SliceLayout(1, block_layout(KEYS, WARPS))
    plain: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    q_blocks = gl.allocate_shared_memory(KIND, [BLOCKS, 1, 1, ROWS, DIM], q_map.layout)
    g_blocks = gl.allocate_shared_memory(KIND, [BLOCKS, 1, 1, ROWS, DIM], grad_map.layout)
    k_memory = gl.allocate_shared_memory(KIND, [2, 1, 1, KEYS, DIM], k_map.layout)
    v_memory = gl.allocate_shared_memory(KIND, [1, 1, KEYS, DIM], v_map.layout)
    dq_memory = gl.allocate_shared_memory(KIND, [2, 1, 1, ROWS, DIM], dq_map.layout)
    map_memory = gl.allocate_shared_memory(KIND, [ROWS, KEYS], tile_layout())  # dS of a block; before that dV
    dv_memory = reinterpret(map_memory, KIND, [1, 1, KEYS, DIM], dv_map.layout)
    parts = gl.allocate_shared_memory(KIND, [COLUMNS, KEYS], tile_layout()).permute((1, 0))
    vectors = ()
    for _ in gl.static_range(6):
        vectors += (gl.allocate_shared_memory(gl.float32, [BLOCKS, ROWS], plain),)
    sums_grads = gl.allocate_shared_memory(gl.float32, [KEYS], plain)
    sums_memory = gl.allocate_shared_memory(gl.float32, [WARPS if SHARES else WARPS // 2, ROWS], plain)
    k_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_ready, g_ready = new_barrier(), new_barrier()
    v_ready = new_barrier()  # for O and values in turn
    for one in gl.static_range(2):
        mbarrier.init(k_ready.index(one), count=1)
    v = reinterpret(v_memory, KIND, [KEYS, DIM], tile_layout())
    all_g = reinterpret(g_blocks, KIND, [KEYS, DIM], tile_layout())
    states_maps, states_blocks, states_ready = (q_map, grad_map), (q_blocks, g_blocks), (q_ready, g_ready)
    fence_async_shared()

    # Concurrent programs process adjacent heads, whose states are adjacent in memory.
    first, step = gl.program_id(0), gl.num_programs(0)
    count = (lines - first + step - 1) // step
    batch, head, key_head = place(first, heads, group)
    mbarrier.expect(q_ready, TILE_BYTES)
    mbarrier.expect(g_ready, TILE_BYTES)
    mbarrier.expect(k_ready.index(0), TILE_BYTES)
    mbarrier.expect(v_ready, TILE_BYTES)
    tl.debug_barrier()
    fetch(k_map, batch, key_head, k_memory.index(0), k_ready.index(0))
    fetch(out_map, batch, head, v_memory, v_ready)
    for one in gl.static_range(BLOCKS):
        fetch_block(states_maps, batch, head, one, states_blocks, states_ready)
    rows = gl.arange(0, KEYS, by_row)
    row_base = first.to(gl.int64) * length
    numbers = load_row_numbers(lse_ptr, inverse_ptr, message_sums_ptr, row_base, rows, length, count > 0)

    for turn in range(count):
        half = turn & 1
        more = turn + 1 < count
        line = first + turn * step
        batch, head, key_head = place(line, heads, group)
        next_batch, next_head, next_key_head = place(line + step, heads, group)
        row_base = line.to(gl.int64) * length
        mask_base = mask_ptr + batch.to(gl.int64) * length
        gamma = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)[0]
        k_tile = k_memory.index(half)
        k = reinterpret(k_tile, KIND, [KEYS, DIM], tile_layout())
        high, inverse, message_sums = numbers
        if PRECISE == 0 and RECEIVES == 1:
            inverse /= r0  # the forward pass divides by messages but for this factor
        mbarrier.wait(q_ready, half)
        mbarrier.wait(g_ready, half)
        mbarrier.wait(v_ready, 0)
        numbers = (high, inverse, message_sums)
        weight = store_numbers(vectors, parts, v, all_g, numbers, gamma, mask_base, length, GAPS, MASKED)
        mbarrier.expect(v_ready, TILE_BYTES)
        mbarrier.wait(k_ready.index(half), (turn >> 1) & 1)
        fence_async_shared()
        tl.debug_barrier()  # all vectors are there, O is not needed any more, and dS of the previous head neither
        fetch(v_map, batch, key_head, v_memory, v_ready)

        dv, own = value_sweep(q_blocks, k, g_blocks, parts, vectors, score_scale, KIND, RECEIVES, GAPS)
        mbarrier.wait(v_ready, 1)
        sums_grads.store((gl.sum(v.load(states).to(gl.float32) * dv, 1) - own) * weight)
        reinterpret(map_memory, KIND, [KEYS, DIM], tile_layout()).store(rounded(dv * weight[:, None], KIND))
        fence_async_shared()
        tl.debug_barrier()
        tma_store(dv_map, [batch, head, 0, 0], dv_memory)
        next_base = (line + step).to(gl.int64) * length
        prefetch_row_numbers(lse_ptr, inverse_ptr, message_sums_ptr, next_base, rows, length, more)

        dk = gl.full([KEYS, DIM], 0.0, gl.float32, states)
        for block in range(BLOCKS):
            before = block - 1
            k_block = reinterpret(k_memory.index(anew(half)), KIND, [KEYS, DIM], tile_layout())
            q = reinterpret(q_blocks.index(block), KIND, [ROWS, DIM], tile_layout())
            g = reinterpret(g_blocks.index(block), KIND, [ROWS, DIM], tile_layout())
            a, d_scores = block_terms(
                q, k_block, v, g, vectors, sums_grads, sums_memory, block, score_scale, RECEIVES, SHARES, GAPS
            )
            if more & (block == 0):
                mbarrier.expect(k_ready.index(1 - half), TILE_BYTES)
                mbarrier.expect(q_ready, TILE_BYTES)
                mbarrier.expect(g_ready, TILE_BYTES)
                mbarrier.expect(v_ready, TILE_BYTES)
            tma.store_wait(0)
            tl.debug_barrier()  # sums are there, dQ of the block before too, whose states nobody needs any more
            if block > 0:
                store_block(dq_map, batch, head, before, dq_memory)
            if more:
                if block == 0:
                    fetch(k_map, next_batch, next_key_head, k_memory.index(1 - half), k_ready.index(1 - half))
                else:
                    fetch_block(states_maps, next_batch, next_head, before, states_blocks, states_ready)
                if block == BLOCKS - 1:
                    fetch(out_map, next_batch, next_head, v_memory, v_ready)
            strength_grad, along = row_term(sums_memory, vectors, block, SHARES)
            map_memory.store(rounded(d_scores - along[:, None] * a, KIND))
            fence_async_shared()
            tl.debug_barrier()
            nothing = gl.full([ROWS, DIM], 0.0, gl.float32, block_layout(DIM, WARPS))
            dq = warpgroup_mma(map_memory, k_block, nothing, use_acc=False, is_async=True)
            dk = warpgroup_mma(map_memory.permute((1, 0)), q, dk, use_acc=True, is_async=True)
            block_rows = block * ROWS + gl.arange(0, ROWS, in_block)
            if MASKED:
                strength_grad *= real_or(mask_base, block_rows, length, 1.0, 0.0, MASKED)
            gl.store(strength_grad_ptr + row_base + block_rows, strength_grad, mask=block_rows < length)
            dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
            dq_block = reinterpret(dq_memory.index(block & 1), KIND, [ROWS, DIM], tile_layout())
            dq_block.store(rounded(dq * scale, KIND))
            fence_async_shared()
        tl.debug_barrier()  # dQ is there, and keys are not needed any more
        store_block(dq_map, batch, head, BLOCKS - 1, dq_memory)
        if more:
            fetch_block(states_maps, next_batch, next_head, BLOCKS - 1, states_blocks, states_ready)
        k.store(rounded(dk * scale, KIND))
        numbers = load_row_numbers(lse_ptr, inverse_ptr, message_sums_ptr, next_base, rows, length, more)
        fence_async_shared()
        tl.debug_barrier()
        tma_store(dk_map, [batch, head, 0, 0], k_tile)
    tma.store_wait(0)

# mypy: ignore-errors
"""``attend_part`` for Hopper and half types: a program is one warp, so that its threads never wait for others.

Scores are ``[heads, keys]``, with the query heads of a key head in the first 8 of a tensor instruction's 16 rows. Those 8 rows, as
the instruction leaves them in registers, are the second operand of V^T P^T, so that weights are not exchanged between
threads and none are computed for rows 8 to 15. Keys and values come by asynchronous copies, STAGES - 1 tiles
ahead, message sums one tile ahead.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from saobp.kernels.decoding.step import LOG2_E, SEEN_BY_PADDING, add_sum
from saobp.kernels.library.arithmetic import finite, raise_maximum
from saobp.kernels.library.gluon_names import async_load
from saobp.kernels.library.packed_bf16 import row_pairs

HEADS = tl.constexpr(8)
"""Query heads that can share a key head."""
BEGIN_NEXT = tl.constexpr("griddepcontrol.launch_dependents; // $0")
"""Assembly that lets the next kernel begin when all programs have come here, if it is launched so."""


@gluon.constexpr_function
def product_layout():
    """Register layout of products of one warp."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def weights_layout():
    """Register layout of ``[HEADS, keys]``, as in the first 8 rows of a product."""
    return gl.BlockedLayout([1, 2], [8, 4], [1, 1], [1, 0])


@gluon.constexpr_function
def copy_layout(columns):
    """Layout of a copy of ``[keys, columns]``: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [1, 1], [1, 0])


@gluon.jit
def copy_tile(memory, base, row_stride, begin, keys, KEYS: tl.constexpr, DIM: tl.constexpr):
    """Starts the copy of KEYS rows; beyond the last key it is copied again."""
    layout: tl.constexpr = copy_layout(DIM)
    local = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    local = gl.minimum(local, keys - 1 - begin)
    places = base + row_stride.to(gl.int64) * begin + (local * row_stride)[:, None] + dims[None, :]
    async_load(memory, places)


@gluon.jit
def load_received(
    past_base, past_rows, mask_base, inside, begin, keys, past_keys, KEYS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Message sums of a tile ``[HEADS, KEYS]``, 0 for keys beyond, and its entries of the mask ``[KEYS]``."""
    places = begin + gl.arange(0, KEYS, gl.SliceLayout(0, weights_layout()))
    past = gl.load(
        past_base + past_rows[:, None] + places[None, :],
        mask=inside[:, None] & (places < past_keys)[None, :],
        other=0.0,
    )
    entry = places
    if MASKED:
        entry = gl.load(mask_base + places, mask=places < keys, other=0)
    return past, entry


@gluon.jit(
    do_not_specialize=[
        "q_batch", "q_head", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row", "mask_batch", "heads", "keys",
        "past_keys", "past_line", "tiles", "parts", "part_tiles",
    ]
)  # fmt: skip
def attend_part_hopper(
    q_ptr, k_ptr, v_ptr, mask_ptr, past_ptr, part_out_ptr, part_sums_ptr, tile_tops_ptr, numerators_ptr,
    q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch,
    heads, keys, past_keys, past_line, tiles, parts, part_tiles, score_scale,
    GROUP: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As ``step.attend_part``."""
    KIND: tl.constexpr = k_ptr.dtype.element_ty
    products: tl.constexpr = product_layout()
    left: tl.constexpr = gl.DotOperandLayout(0, products, 2)
    right: tl.constexpr = gl.DotOperandLayout(1, products, 2)
    weights: tl.constexpr = weights_layout()
    by_head: tl.constexpr = gl.SliceLayout(1, weights)
    by_key: tl.constexpr = gl.SliceLayout(0, weights)
    by_column: tl.constexpr = gl.SliceLayout(0, products)
    tile_layout: tl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    gl.inline_asm_elementwise(BEGIN_NEXT, "=r", [], gl.int32, False, 1)

    part = gl.program_id(0) % parts
    line = gl.program_id(0) // parts
    key_heads = heads // GROUP
    batch, key_head = (line // key_heads).to(gl.int64), line % key_heads
    k_base = k_ptr + (batch * k_batch + key_head * k_head) * 8
    v_base = v_ptr + (batch * v_batch + key_head * v_head) * 8
    first_row = batch * heads + key_head * GROUP
    past_base = past_ptr + first_row * past_line * 16
    first, last = part * part_tiles, min(part * part_tiles + part_tiles, tiles)
    k_memory = gl.allocate_shared_memory(KIND, [STAGES, KEYS, DIM], tile_layout)
    v_memory = gl.allocate_shared_memory(KIND, [STAGES, KEYS, DIM], tile_layout)
    for ahead in gl.static_range(STAGES - 1):
        if first + ahead < last:
            begin = (first + ahead) * KEYS
            copy_tile(k_memory.index(ahead), k_base, k_row * 8, begin, keys, KEYS, DIM)
            copy_tile(v_memory.index(ahead), v_base, v_row * 8, begin, keys, KEYS, DIM)
        async_copy.commit_group()

    copied: tl.constexpr = copy_layout(DIM)
    q_rows = gl.arange(0, 2 * HEADS, gl.SliceLayout(1, copied))
    q_dims = gl.arange(0, DIM, gl.SliceLayout(0, copied))
    q_base = q_ptr + (batch * q_batch + key_head * GROUP * q_head) * 8
    q = gl.load(
        q_base + (q_rows * q_head * 8)[:, None] + q_dims[None, :], mask=(q_rows < GROUP)[:, None], other=0.0
    )
    q = gl.convert_layout(q, left)
    head = gl.arange(0, HEADS, by_head)
    inside = head < GROUP
    past_rows = head * past_line * 16
    mask_base = mask_ptr + batch * mask_batch
    past, entry = load_received(
        past_base, past_rows, mask_base, inside, first * KEYS, keys, past_keys, KEYS, MASKED
    )
    none = gl.full([2 * HEADS, KEYS], 0.0, gl.float32, products)
    out = gl.full([DIM, HEADS], 0.0, gl.float32, products)
    top = gl.full([HEADS], float("-inf"), gl.float32, by_head)
    total = gl.full([HEADS], 0.0, gl.float32, by_head)
    prior_top, prior_total = top, total
    for tile in range(first, last):
        stage, free = (tile - first) % STAGES, (tile - first + STAGES - 1) % STAGES
        async_copy.wait_group(STAGES - 2)
        if tile + STAGES - 1 < last:
            begin = (tile + STAGES - 1) * KEYS
            copy_tile(k_memory.index(free), k_base, k_row * 8, begin, keys, KEYS, DIM)
            copy_tile(v_memory.index(free), v_base, v_row * 8, begin, keys, KEYS, DIM)
        async_copy.commit_group()
        begin = min(tile + 1, last - 1) * KEYS
        next_past, next_entry = load_received(
            past_base, past_rows, mask_base, inside, begin, keys, past_keys, KEYS, MASKED
        )
        places = tile * KEYS + gl.arange(0, KEYS, by_key)
        seen = places < keys
        sends = seen
        if MASKED:
            seen, sends = entry != 0, entry != SEEN_BY_PADDING
        k = k_memory.index(stage).permute((1, 0)).load(right)
        scores, _ = row_pairs(mma_v2(q, k, none))
        scores = gl.convert_layout(scores, weights) * score_scale
        scores = gl.where(seen[None, :], scores, float("-inf"))
        tile_top = gl.max(scores, 1)
        prior = gl.exp2(scores - finite(tile_top)[:, None])
        prior_top, prior_total = add_sum(prior_top, prior_total, tile_top, gl.sum(prior, 1))
        gl.store(tile_tops_ptr + (first_row + head) * tiles + tile, tile_top, mask=inside)
        if MASKED:
            prior = gl.where(sends[None, :], prior, 0.0)
        gl.store(
            numerators_ptr + ((first_row + head) * tiles * KEYS)[:, None] + places[None, :], prior.to(gl.float16),
            mask=inside[:, None], eviction_policy="evict_last",
        )  # fmt: skip
        beliefs = scores + past * LOG2_E
        top, anchor, shrink = raise_maximum(top, beliefs)
        refined = gl.exp2(beliefs - anchor[:, None])
        total = total * shrink + gl.sum(refined, 1)
        v = v_memory.index(stage).permute((1, 0)).load(left)
        out *= gl.convert_layout(shrink, by_column)[None, :]
        out = mma_v2(v, gl.convert_layout(gl.permute(refined.to(KIND), (1, 0)), right), out)
        past, entry = next_past, next_entry
    async_copy.wait_group(0)
    place = (first_row + head) * parts + part
    gl.store(part_sums_ptr + place * 4, top, mask=inside)
    gl.store(part_sums_ptr + place * 4 + 1, total, mask=inside)
    gl.store(part_sums_ptr + place * 4 + 2, prior_top, mask=inside)
    gl.store(part_sums_ptr + place * 4 + 3, prior_total, mask=inside)
    column = gl.arange(0, HEADS, by_column)
    dims = gl.arange(0, DIM, gl.SliceLayout(1, products))
    out_places = (((first_row + column) * parts + part) * DIM)[None, :] + dims[:, None]
    gl.store(part_out_ptr + out_places, out, mask=(column < GROUP)[None, :])

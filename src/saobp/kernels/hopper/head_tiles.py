# mypy: ignore-errors
"""What kernels for Hopper share: layouts of a head's tiles, sums of their rows, and fetches by TMA."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from saobp.kernels.library.gluon_names import tma_load

DIM = tl.constexpr(64)
COLUMNS = tl.constexpr(8)
"""Columns of products that only sum rows."""


@gluon.constexpr_function
def tile_layout(columns=64):
    """Shared-memory layout of half-type tiles, as TMA writes and the tensor cores read them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)


@gluon.constexpr_function
def product_layout(columns, warps):
    """Register layout of a product with that many columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def narrow_layout(warps):
    """Register layout of row sums, by the smaller tensor instruction that takes both operands from registers."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.jit
def add_row_sums(tile, sums):
    """Adds the sums of a tile's rows to every column of ``sums``."""
    narrow: tl.constexpr = narrow_layout(gl.num_warps())
    ones = gl.full([tile.shape[1], COLUMNS], 1.0, tile.dtype, gl.DotOperandLayout(1, narrow, 2))
    return mma_v2(gl.convert_layout(tile, gl.DotOperandLayout(0, narrow, 2)), ones, sums)


@gluon.jit
def row_sums_of(tile):
    """Sums of the rows of a tile in a half type."""
    none = gl.full([tile.shape[0], COLUMNS], 0.0, gl.float32, narrow_layout(gl.num_warps()))
    return gl.max(add_row_sums(tile, none), 1)


@gluon.jit
def place(line, heads, group):
    """Batch, head and key head of ``line`` = batch * heads + head."""
    batch = line // heads
    head = line - batch * heads
    return batch, head, head // group


@gluon.jit
def next_place(batch, head, batch_step, head_step, heads):
    """Batch and head some heads further on, without a division."""
    head += head_step
    wraps = (head >= heads).to(gl.int32)
    return batch + batch_step + wraps, head - wraps * heads


@gluon.jit
def fetch(tensor_map, batch, head, into, ready):
    """Starts the TMA fetch of a head's rows."""
    tma_load(tensor_map, [batch, head, 0, 0], ready, into)


@gluon.jit
def fetch_head(
    q_map, k_map, v_map, batch, head, key_head, q_memory, k_memory, v_memory, q_ready, k_ready, v_ready,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Starts the fetch of a head's queries, keys and values, of BYTES each, once no warp needs the ones before."""
    mbarrier.expect(q_ready, BYTES)
    mbarrier.expect(k_ready, BYTES)
    mbarrier.expect(v_ready, BYTES)
    tl.debug_barrier()
    fetch(q_map, batch, head, q_memory, q_ready)
    fetch(k_map, batch, key_head, k_memory, k_ready)
    fetch(v_map, batch, key_head, v_memory, v_ready)


@gluon.jit
def new_barrier():
    """A barrier that signals the end of a fetch."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier

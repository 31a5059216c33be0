# mypy: ignore-errors
"""Tiles of keys and values in the order in which blocks of causal rows use them, through a ring of shared memory.

A block that sees ``seen`` tiles of keys uses all of them for its rows' log-sum-exp, then keys and values by turns: the
uses 0 to ``seen - 1``, and from there on two for each tile, ``3 * seen`` in all. A tile that is used makes room for that
STAGES later, which may be one of the following block, or of the next head's first.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saobp.kernels.hopper.head_tiles import DIM, tile_layout
from saobp.kernels.library.gluon_names import reinterpret, tma_load

KEYS = tl.constexpr(64)
TILE_BYTES = tl.constexpr(2 * 64 * 64)
STAGES = tl.constexpr(3)
"""Tiles of the ring. Every block uses three or more, so what comes STAGES later is at most one block ahead; and
a multiple of three, so every block begins with the ring's first tile, which ``refine_heads`` relies on."""


@gluon.jit
def tiles_seen(block, tiles, EACH: tl.constexpr):
    """Tiles of keys that a block of rows sees; it has EACH of its own."""
    return gl.minimum((block + 1) * EACH, tiles)


@gluon.jit
def announce(number, stage, end, more, ready):
    """Before the barrier after which ``fetch_tile`` is called: the bytes to come."""
    if (number < end) | more:
        mbarrier.expect(ready.index(stage), TILE_BYTES)


@gluon.jit
def fetch_tile(number, stage, here, following, more, tiles_from):
    """Starts the fetch of the tile that a block of rows uses as its ``number``-th, or the following block one of its first.

    ``here`` and ``following``: batch and head of the keys, and how many tiles of them the block sees; ``more``: whether
    there is a following block; ``tiles_from``: maps of keys and values, ring, and its barriers.
    """
    k_map, v_map, ring, ready = tiles_from
    end = 3 * here[2]
    if (number < end) | more:
        later = number >= end
        use = gl.where(later, number - end, number)
        refining = use - gl.where(later, following[2], here[2])
        row = gl.where(refining >= 0, refining >> 1, use) * KEYS
        batch, head = gl.where(later, following[0], here[0]), gl.where(later, following[1], here[1])
        if (refining >= 0) & ((refining & 1) == 1):
            tma_load(v_map, [batch, head, row, 0], ready.index(stage), ring.index(stage))
        else:
            tma_load(k_map, [batch, head, row, 0], ready.index(stage), ring.index(stage))


@gluon.jit
def awaited(count, ring, ready, KIND: tl.constexpr):
    """The tile that is used as the ``count``-th of all, once it is there."""
    stage = count % STAGES
    mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
    return reinterpret(ring.index(stage), KIND, [KEYS, DIM], tile_layout())

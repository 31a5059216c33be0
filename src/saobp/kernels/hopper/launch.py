"""When the kernel for Hopper serves short sequences, and its launch.

Triton makes the four descriptors that it needs at every launch, 11 microseconds of the host's time each. Fewer heads than
HOPPER_FROM are done in less, so they stay with ``short_weak_forward``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from saobp.kernels.call_spec import SHORT, Block, Problem, ceil_div, resources
from saobp.kernels.runtime.launcher import HOPPER, INTERPRETED, Launch, Tiles, cuda_generation, is_aligned

TRITONS = ("3.6.", "3.7.")
"""Versions whose Gluon, which is experimental, the kernel is known to compile with."""
HOPPER_FROM = 2048
BLOCK = Block(128, 128, warps=8, stages=1, registers=128)
"""All rows at once in eight warps. Four warps, which take rows in two halves, are as fast, but slower where they save or pad."""
HEADS_EACH = 4
"""Heads of a program. Microseconds of 2048 heads on an H200: 50 with one, 47 with two, 45 with four, 44.5 with eight; of 8192
heads: 182, 165 with four, 169 with eight, 172 with 32. ``short_weak_forward`` takes 55 and 188, cuDNN's attention 38 and 130."""


@lru_cache
def hopper_kernel() -> Any:
    """The kernel; None in a Triton whose Gluon may be another."""
    if not triton.__version__.startswith(TRITONS):
        return None
    from saobp.kernels.hopper.short_forward import short_hopper_forward

    return short_hopper_forward


def hopper_serves(problem: Problem, weak: Block | None, *states: Tensor) -> bool:
    """Whether the kernel for Hopper may take the place of ``short_weak_forward``, whose tile ``weak`` is."""
    return (
        weak is not None
        and weak.keys == SHORT
        and problem.dim == 64
        and problem.dtype != torch.float32
        and not problem.packed
        and problem.sequences * problem.heads >= HOPPER_FROM
        and not INTERPRETED
        and cuda_generation(states[0].device) == HOPPER
        and all(is_aligned(one) for one in states)
        and hopper_kernel() is not None
    )


def hopper_launch(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, out: Tensor, saves: bool
) -> Launch:
    lines = problem.sequences * problem.heads
    numbers = {
        **problem.numbers, **problem.constants, **problem.drop_numbers, **problem.message_numbers,
        "lines": lines, "TAIL": problem.length != SHORT, "HEARS": problem.hears,
        "DROPS": problem.dropout > 0, "SAVES": saves, **resources(BLOCK),
    }  # fmt: skip
    states = {"q": query, "k": key, "v": value, "out": out}
    tiles = {name: whole_heads(one) for name, one in states.items()}
    programs = ceil_div(lines, HEADS_EACH)
    return Launch(hopper_kernel(), programs, numbers, query.device, tiles)


def whole_heads(states: Tensor) -> Tiles:
    """``[batch, heads, length, 64]`` in tiles of a head, laid out as the tensor cores want them."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return Tiles(tuple(states.shape), states.stride(), (1, 1, SHORT, states.shape[3]), layout)

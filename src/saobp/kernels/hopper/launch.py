"""The launches of the Hopper kernels; ``dispatch.select_kernels`` decides when they are used.

Triton creates their tensor descriptors, two to eight, at every launch, which costs the host 11 microseconds each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels.call_spec import JOINT, SHORT, WHOLE, Block, CallSpec, ceil_div, next_power_of_2, resources
from saobp.kernels.runtime.launcher import LaunchSequence, TileDescriptor, multiprocessors

BLOCK = Block(128, 128, warps=8, stages=1, registers=128)
"""All rows at once in eight warps. Four warps, which take rows in two halves, are as fast, but slower with SAVES or padding."""
HEADS_EACH = 4
"""Heads per program. Microseconds for 2048 heads on an H200: 50 with one, 47 with two, 45 with four, 44.5 with eight; of 8192
heads: 182, 165 with four, 169 with eight, 172 with 32. ``short_weak_forward`` takes 55 and 188, cuDNN's attention 38 and 130."""


def hopper_kernel() -> Any:
    """Imported on first use: other versions of Triton may lack the Gluon API it needs."""
    from saobp.kernels.hopper.short_forward import short_hopper_forward

    return short_hopper_forward


BACKWARD_BLOCK = Block(128, 128, warps=8, stages=1)
"""One program on a multiprocessor: its map is all that the registers hold."""


def hopper_backward_kernel() -> Any:
    """As ``hopper_kernel``."""
    from saobp.kernels.hopper.short_backward import short_hopper_backward

    return short_hopper_backward


def add_hopper_backward_launch(
    launches: LaunchSequence, spec: CallSpec, query: Tensor, key: Tensor, value: Tensor, grad: Tensor,
    named: dict[str, str],
) -> None:  # fmt: skip
    lines = spec.sequences * spec.heads
    numbers = {
        **spec.numbers, **spec.constants, **spec.drop_numbers, **spec.message_numbers,
        "lines": lines, "scale": spec.scale, "TAIL": spec.length != SHORT, "RECEIVES": spec.receives,
        "WEAK": spec.precise == 0, "CAREFUL": spec.may_underflow, "share": spec.length / spec.senders,
        "DROPS": spec.dropout > 0, **resources(BACKWARD_BLOCK),
    }  # fmt: skip
    tiles = {
        name: whole_heads(spec.states_shape, spec.gradient_strides, SHORT) for name in ("dq", "dk", "dv")
    }
    for name, states in (("q", query), ("k", key), ("v", value), ("grad", grad)):
        tiles[name] = whole_heads(tuple(states.shape), states.stride(), SHORT)
    launches.add(hopper_backward_kernel(), min(lines, multiprocessors(grad.device)), numbers, tiles, **named)


def add_hopper_launch(
    launches: LaunchSequence, spec: CallSpec, query: Tensor, key: Tensor, value: Tensor, saves: bool,
    strong: bool, named: dict[str, str],
) -> None:  # fmt: skip
    lines = spec.sequences * spec.heads
    numbers = {
        **spec.numbers, **spec.constants, **spec.drop_numbers, **spec.message_numbers,
        "lines": lines, "TAIL": spec.length != SHORT, "RECEIVES": spec.receives, "STRONG": strong,
        "CAREFUL": strong and spec.may_underflow,
        "share": spec.length / spec.senders,
        "DROPS": spec.dropout > 0, "SAVES": saves, **resources(BLOCK),
    }  # fmt: skip
    tiles = states_tiles(spec, query, key, value, SHORT)
    launches.add(hopper_kernel(), ceil_div(lines, HEADS_EACH), numbers, tiles, **named)


WHOLE_BLOCK = Block(256, 256, warps=16, stages=1, registers=128)
"""All registers of a multiprocessor."""


def whole_map_kernel() -> Any:
    """As ``hopper_kernel``."""
    from saobp.kernels.hopper.whole_map import whole_map_forward

    return whole_map_forward


def add_whole_map_launch(
    launches: LaunchSequence, spec: CallSpec, query: Tensor, key: Tensor, value: Tensor
) -> None:
    """One program for each multiprocessor, which the heads are dealt out to."""
    lines = spec.sequences * spec.heads
    numbers = {
        **spec.numbers, **spec.constants, **spec.drop_numbers, **spec.message_numbers,
        "lines": lines, "TAIL": spec.length != WHOLE, "RECEIVES": spec.receives, "PRECISE": spec.precise,
        "DROPS": spec.dropout > 0, **resources(WHOLE_BLOCK),
    }  # fmt: skip
    tiles = states_tiles(spec, query, key, value, WHOLE)
    launches.add(whole_map_kernel(), min(lines, multiprocessors(query.device)), numbers, tiles)


WHOLE_BACKWARD_BLOCK = Block(64, 256, warps=8, stages=1)
"""A block of rows and the gradient of all keys fill the registers of a multiprocessor. Sixteen warps of 128 registers have a
third more instructions in all, and spill more."""


def whole_map_backward_kernel() -> Any:
    """As ``hopper_kernel``."""
    from saobp.kernels.hopper.whole_map_backward import whole_map_backward

    return whole_map_backward


def add_whole_map_backward_launch(
    launches: LaunchSequence, spec: CallSpec, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, out: Tensor
) -> None:  # fmt: skip
    """As ``add_whole_map_launch``. Queries, dO and dQ come in blocks of rows, all else in whole heads."""
    lines = spec.sequences * spec.heads
    numbers = {
        **spec.numbers, **spec.constants, **spec.message_numbers,
        "lines": lines, "scale": spec.scale, "TAIL": spec.length != WHOLE, "RECEIVES": spec.receives,
        "PRECISE": spec.precise, **resources(WHOLE_BACKWARD_BLOCK),
    }  # fmt: skip
    rows = WHOLE_BACKWARD_BLOCK.rows
    tiles = {
        name: whole_heads(spec.states_shape, spec.gradient_strides, rows if name == "dq" else WHOLE)
        for name in ("dq", "dk", "dv")
    }
    for name, states in (("q", query), ("k", key), ("v", value), ("grad", grad), ("out", out)):
        by_blocks = name in ("q", "grad")
        tiles[name] = whole_heads(tuple(states.shape), states.stride(), rows if by_blocks else WHOLE)
    launches.add(whole_map_backward_kernel(), min(lines, multiprocessors(grad.device)), numbers, tiles)


JOINT_SUMS_BLOCK = Block(64, JOINT, warps=16, stages=1, registers=128)
"""All registers of a multiprocessor: half of them are a block's entries, a quarter products of messages."""


def joint_sums_kernel() -> Any:
    """As ``hopper_kernel``."""
    from saobp.kernels.hopper.joint_sums import joint_sums

    return joint_sums


def add_joint_sums_launch(launches: LaunchSequence, spec: CallSpec, query: Tensor, key: Tensor) -> None:
    """As ``add_whole_map_launch``."""
    lines, block = spec.sequences * spec.heads, JOINT_SUMS_BLOCK
    numbers = {
        **spec.numbers, **spec.constants, **spec.message_numbers,
        "lines": lines, "TAIL": spec.length != JOINT, **resources(block),
    }  # fmt: skip
    tiles = {
        "q": whole_heads(tuple(query.shape), query.stride(), block.rows),
        "k": whole_heads(tuple(key.shape), key.stride(), block.keys // 2),
    }
    launches.add(joint_sums_kernel(), min(lines, multiprocessors(query.device)), numbers, tiles)


CAUSAL_BLOCK = Block(64, 64, warps=4, stages=1, registers=128)
"""Rows of a block, and keys of a tile: up to CAUSAL_SMALL tokens. Four programs on a multiprocessor."""
CAUSAL_LONG_BLOCK = Block(128, 64, warps=4, stages=1)
"""For more tokens: two programs on a multiprocessor, which read each tile of keys and values half as often."""
CAUSAL_SMALL = 512


def causal_block(spec: CallSpec) -> Block:
    return CAUSAL_BLOCK if spec.length <= CAUSAL_SMALL else CAUSAL_LONG_BLOCK


def causal_kernel() -> Any:
    """As ``hopper_kernel``."""
    from saobp.kernels.hopper.causal_forward import causal_hopper_forward

    return causal_hopper_forward


def add_causal_launch(
    launches: LaunchSequence, spec: CallSpec, query: Tensor, key: Tensor, value: Tensor, records: bool, rests: bool,
    unused: dict[str, str],
) -> None:  # fmt: skip
    """Heads are dealt out to programs that run side by side.

    ``records``: the backward pass needs to know which rows underflowed; ``rests``: also what rounding the output left.
    ``unused`` names a tensor in place of what is not stored.
    """
    lines, block = spec.sequences * spec.heads, causal_block(spec)
    lowest_sum = spec.lowest_sum if spec.dtype == torch.float16 else 2.0**-100
    raises = spec.sign < 0 or spec.bound < 0
    repeats = not raises and spec.may_fall_below(lowest_sum)
    numbers = {
        **spec.numbers, **spec.constants, **spec.drop_numbers, **spec.message_numbers,
        "lines": lines, "TILES": next_power_of_2(ceil_div(spec.length, block.keys)), "ROWS": block.rows,
        "TAIL": spec.length % block.rows != 0, "PRECISE": spec.precise, "DROPS": spec.dropout > 0,
        "lowest_blocks": ceil_div(spec.length, 64), "lowest_sum": lowest_sum,
        "RECORDS": records or repeats, "REPEATS": repeats, "CAREFUL": raises, "RESTS": rests, **resources(block),
    }  # fmt: skip
    tiles = states_tiles(spec, query, key, value, block.rows)
    for name, states in (("k", key), ("v", value)):
        tiles[name] = whole_heads(tuple(states.shape), states.stride(), block.keys)
    programs = min(lines, 256 // block.rows * multiprocessors(query.device))
    launches.add(causal_kernel(), programs, numbers, tiles, **unused)


def states_tiles(
    spec: CallSpec, query: Tensor, key: Tensor, value: Tensor, rows: int
) -> dict[str, TileDescriptor]:
    """Descriptors of queries, keys, values and output, in tiles of one head's ``rows``."""
    tiles = {"out": whole_heads(spec.states_shape, spec.states_strides, rows)}
    for name, states in (("q", query), ("k", key), ("v", value)):
        tiles[name] = whole_heads(tuple(states.shape), states.stride(), rows)
    return tiles


def whole_heads(shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> TileDescriptor:
    """``[batch, heads, length, 64]`` in tiles of one head, in the tensor cores' shared-memory layout."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TileDescriptor(shape, strides, (1, 1, rows, shape[3]), layout)

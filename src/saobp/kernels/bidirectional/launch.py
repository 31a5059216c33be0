"""Bidirectional attention on long sequences: tile sizes and launches of the sweeps, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from saobp.kernels.bidirectional import backward, careful_backward, forward, gradient_terms, sums
from saobp.kernels.call_spec import (
    Block,
    CallSpec,
    CallTensors,
    blocks,
    ceil_div,
    kernel_tensors,
    layout,
    named_strides,
    next_power_of_2,
    resources,
    strides,
)
from saobp.kernels.hopper.launch import (
    add_joint_sums_launch,
    add_whole_map_backward_launch,
    add_whole_map_launch,
)
from saobp.kernels.runtime.family import INPUT_NAMES, KernelFamily, LaunchPlan, Saved
from saobp.kernels.runtime.launcher import (
    BufferSlice,
    LaunchSequence,
    TileDescriptor,
    cached,
    kernels_for,
    lay_out_buffer,
)
from saobp.kernels.runtime.two_streams import second_half_offsets


def sweep_block(spec: CallSpec, sweep: str) -> Block:
    """Tile of a sweep. Under ``torch.compile`` the head size may be symbolic, hence ``int``."""
    return _sweep_block(spec.dtype, int(spec.dim), sweep)


@lru_cache(maxsize=4096)
def _sweep_block(dtype: torch.dtype, dim: int, sweep: str) -> Block:
    """Tile sizes found by ``benchmarks/tune_sweeps.py`` on an H200; small where registers are scarce."""
    if dtype == torch.float32:
        return Block(32, 32, warps=4, stages=1) if dim > 64 else Block(64, 32, warps=4, stages=2)
    if dim > 128:
        return Block(64, 32, warps=4, stages=2)
    if dim > 64:
        return Block(64, 64, warps=4, stages=2)
    return {
        "row_sums": Block(64, 128, 4, 2),
        "column_messages": Block(64, 128, 4, 2, 80),
        "refined_output": Block(128, 64, 4, 3),
        "value_gradient": Block(32, 128, 4, 3, 168),
        "query_gradient": Block(64, 64, 4, 3, 168),
        "key_gradient": Block(64, 64, 4, 3, 168),
    }[sweep]


def lowest_blocks(spec: CallSpec) -> int:
    """Blocks of rows of a head, each of which records its smallest normaliser."""
    return ceil_div(spec.longest, sweep_block(spec, "refined_output").rows)


def saved_slices(spec: CallSpec) -> tuple[dict[str, BufferSlice], int]:
    """What the backward pass needs besides the output, and each block of keys' largest sum of messages."""
    floats, rows = torch.float32, spec.rows_shape
    keys = rows if spec.receives else (0,)
    lowest = spec.sequences * spec.heads * lowest_blocks(spec)
    peaks = spec.programs(sweep_block(spec, "column_messages").keys) if spec.receives else 0
    return lay_out_buffer("saved", {
        "lse": (spec.lse_shape, floats), "message_sums": (keys, floats),
        "anchor": (rows, floats), "inverse": (rows, floats),
        "lowest": ((lowest,), floats), "peak": ((peaks,), floats), "weight": (keys, spec.weight_dtype),
    }, alignment=4)  # fmt: skip


def saved_buffer(spec: CallSpec) -> Saved:
    return {"saved": ((saved_slices(spec)[1],), torch.uint8)}


Fetch = Callable[[str, int], dict[str, TileDescriptor]]
"""Maps names of states and rows per tile to TMA descriptors; empty where TMA is not used."""
Step = Callable[[LaunchSequence, CallSpec, dict[str, Any], Fetch], None]


def plan_forward(
    spec: CallSpec, tensors: CallTensors, _saves: bool = True, steps: tuple[Step, ...] = ()
) -> LaunchPlan:
    query, key, value, strength, *_ = tensors
    states = {"q": query, "k": key, "v": value}
    choice = kernels_for("long", spec, query, key, value)
    slices, _ = saved_slices(spec)
    launches = LaunchSequence(query.device, (*INPUT_NAMES, "out", "saved"), slices)
    numbers = _numbers(spec, query, key, value) | named_strides("o", spec.states_strides)

    def fetch(names: str, rows: int) -> dict[str, TileDescriptor]:
        fetched = {name: states[name] for name in names if choice.tma}
        tile = (1, 1, rows, spec.dim)
        return {name: TileDescriptor(tuple(one.shape), one.stride(), tile) for name, one in fetched.items()}

    if choice.hopper and not steps:
        add_whole_map_launch(launches, spec, query, key, value)
        if spec.may_underflow:
            _add_careful(launches, spec, numbers, CHECKED_BLOCKS)
        return LaunchPlan(launches)
    for add_step in steps or (_add_sums, _add_output):
        if add_step is _add_sums and choice.joint_sums:
            add_joint_sums_launch(launches, spec, query, key)
            continue
        add_step(launches, spec, numbers | {"MAPPED": choice.tma}, fetch)
    dtypes = {"out": query.dtype}
    # A persistent kernel's grid is not one program per head, so it cannot be split over two streams.
    axis = None if choice.joint_sums else choice.split_axis
    launches.in_two_streams(second_half_offsets(spec, axis, strength, states, dtypes, slices))
    return LaunchPlan(launches)


def _add_sums(launches: LaunchSequence, spec: CallSpec, numbers: dict[str, Any], fetch: Fetch) -> None:
    block = sweep_block(spec, "row_sums")
    sizes = blocks(spec, block, block.rows, block.keys)
    launches.add(sums.row_sums, spec.programs(block.rows), numbers | sizes, senders="strength")
    if not spec.receives:
        return
    block = sweep_block(spec, "column_messages")
    programs, count = spec.programs(block.keys), ceil_div(spec.longest, block.keys)
    sizes = blocks(spec, block, block.keys, block.rows)
    launches.add(sums.column_messages, programs, numbers | sizes, fetch("q", block.rows), senders="strength")
    sizes = {"blocks": count, "KEYS": block.keys, "BLOCKS": next_power_of_2(count)}
    launches.add(sums.key_weights, programs, numbers | sizes)


def _add_output(launches: LaunchSequence, spec: CallSpec, numbers: dict[str, Any], fetch: Fetch) -> None:
    block = sweep_block(spec, "refined_output")
    programs, tiles = spec.programs(block.rows), fetch("kv", block.keys)
    if tiles and spec.precise == 0:  # few registers: three programs per multiprocessor
        block = replace(block, registers=168)
    sizes = blocks(spec, block, block.rows, block.keys)
    launches.add(forward.refined_output, programs, numbers | sizes, tiles)
    if spec.may_underflow:
        _add_careful(launches, spec, numbers)


CHECKED_BLOCKS = 8
"""Blocks of rows that one program of ``careful_output`` looks at after a kernel that takes as long as a few launches."""


def _add_careful(
    launches: LaunchSequence, spec: CallSpec, numbers: dict[str, Any], blocks_each: int = 1
) -> None:
    """Recomputes rows that underflowed."""
    rows = sweep_block(spec, "refined_output").rows
    programs = spec.programs(rows)
    sizes = blocks(spec, Block(rows, 32, stages=1), rows, 32)
    sizes |= {"all_blocks": programs, "BLOCKS_EACH": blocks_each}
    launches.add(forward.careful_output, ceil_div(programs, blocks_each), numbers | sizes)


def _numbers(spec: CallSpec, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Arguments common to the sweeps."""
    lowest = lowest_blocks(spec)
    return {
        **strides("q", query), **strides("k", key), **strides("v", value), **spec.numbers, **spec.constants,
        **spec.drop_numbers, **spec.message_numbers, "low_plane": spec.low_plane, "scale": spec.scale,
        "RECEIVES": spec.receives, "PRECISE": spec.precise, "DROPS": spec.dropout > 0, "POWER": spec.splits_inverse,
        "lowest_blocks": lowest, "LOWEST_BLOCKS": next_power_of_2(lowest), "lowest_sum": spec.lowest_sum,
        "CHECKED": spec.may_underflow,
    }  # fmt: skip


BACKWARD_NAMES = (*INPUT_NAMES, "grad", "out", "saved", "dq", "dk", "dv", "strength_grad", "scratch")
PARTS = 16
"""Columns that the half-type parts of D are padded to: the minimum of a tensor-core product."""


def plan_backward(
    spec: CallSpec, tensors: CallTensors, grad: Tensor, out: Tensor, *, only_values: bool = False
) -> LaunchPlan:
    query, key, value, strength, *_ = tensors
    floats, dtype, rows = torch.float32, query.dtype, spec.rows_shape
    scratch, size = lay_out_buffer("scratch", {
        "scaled": (spec.states_shape, dtype), "delta": (rows, floats), "parts": ((*rows, PARTS), dtype),
        "power": (rows if spec.splits_inverse else (0,), floats), "row_term": (rows, floats),
        "sums_grad": (rows, floats), "minus_gamma_dc": (rows if spec.precise == 0 else (0,), dtype),
    })  # fmt: skip
    slices = saved_slices(spec)[0] | scratch
    launches = LaunchSequence(query.device, BACKWARD_NAMES, slices)
    choice = kernels_for("long", spec, query, key, value, grad, out)
    numbers = _numbers(spec, query, key, value) | {"part_row": PARTS}
    numbers |= named_strides("d", spec.gradient_strides)
    if choice.hopper_back and not only_values:
        add_whole_map_backward_launch(launches, spec, query, key, value, grad, out)
        if spec.may_underflow:
            numbers |= strides("g", grad) | strides("o", out) | named_strides("s", spec.states_strides)
            _add_careful_gradients(launches, spec, numbers)
        return LaunchPlan(launches, size)
    add_scaled_gradients(launches, spec, grad, out)
    numbers |= named_strides("g", spec.states_strides)
    for sweep in (backward.value_gradient, backward.query_gradient, backward.key_gradient):
        by_rows = sweep is backward.query_gradient
        block = sweep_block(spec, sweep.__name__)
        gridded, walked = (block.rows, block.keys) if by_rows else (block.keys, block.rows)
        sizes, programs = blocks(spec, block, gridded, walked), spec.programs(gridded)
        ways = [("weight", False), ("message_sums", True)] if spec.may_underflow else [("weight", False)]
        for key_part, careful in ways:
            launches.add(
                sweep, programs, numbers | sizes | {"CAREFUL": careful}, grad="scaled", key_part=key_part
            )
        if only_values:
            break
    if not only_values:
        states = {"q": query, "k": key, "v": value, "grad": grad, "out": out}
        dtypes = dict.fromkeys(("dq", "dk", "dv"), dtype)
        launches.in_two_streams(
            second_half_offsets(spec, choice.split_axis, strength, states, {}, slices, gradients=dtypes)
        )
    return LaunchPlan(launches, size)


CHECKED_HEADS = 2
"""Heads that one program of ``careful_gradients`` looks at."""


def _add_careful_gradients(launches: LaunchSequence, spec: CallSpec, numbers: dict[str, Any]) -> None:
    """Recomputes heads in which rows underflowed."""
    lines, block = spec.sequences * spec.heads, Block(64, 64, stages=1)
    sizes = {
        "lines": lines, "SIZE": block.rows, "TAIL": spec.length % block.rows != 0, "HEADS_EACH": CHECKED_HEADS,
        **resources(block),
    }  # fmt: skip
    launches.add(careful_backward.careful_gradients, ceil_div(lines, CHECKED_HEADS), numbers | sizes)


def add_scaled_gradients(
    launches: LaunchSequence,
    spec: CallSpec,
    grad: Tensor,
    out: Tensor,
    *,
    in_parts: bool = True,
    **named: str,
) -> None:
    """Launches ``scaled_gradients``: dO over the rows' normalisers, D of that, and powers of two split off."""
    numbers = {
        **strides("g", grad), **strides("o", out), **named_strides("s", spec.states_strides), "part_row": PARTS,
        **spec.numbers, **spec.constants, "blocks": ceil_div(spec.longest, 128), "ROWS": 128,
        "POWER": spec.splits_inverse, "PRECISE": spec.precise if in_parts else 2,
    }  # fmt: skip
    launches.add(gradient_terms.scaled_gradients, spec.programs(128), numbers, **named)


LONG = KernelFamily(
    "long", "refined_attention", saved=saved_buffer, plan_forward=plan_forward, plan_backward=plan_backward
)

_plans: dict[Hashable, LaunchPlan] = {}


def run_sums(spec: CallSpec, query: Tensor, key: Tensor, strength: Tensor) -> Tensor:
    """The part of the saved buffer that does not depend on values: row and key sums."""
    tensors = CallTensors(query, key, query, strength)
    saved = query.new_empty(saved_slices(spec)[1], dtype=torch.uint8)
    cache_key = ("sums", spec, *layout(tensors))
    plan = cached(_plans, cache_key, plan_forward, spec, tensors, True, (_add_sums,))
    plan.launches(*kernel_tensors(tensors), query, saved)
    return saved


def run_output(
    spec: CallSpec, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, saved: Tensor
) -> Tensor:
    """Refined rows times values, from the result of ``run_sums``; completes the saved buffer."""
    tensors = CallTensors(query, key, value, strength)
    cache_key = ("output", spec, *layout(tensors))
    plan = cached(_plans, cache_key, plan_forward, spec, tensors, True, (_add_output,))
    out = query.new_empty_strided(spec.states_shape, spec.states_strides)
    plan.launches(*kernel_tensors(tensors), out, saved)
    return out


def run_value_gradient(
    spec: CallSpec, grad: Tensor, query: Tensor, key: Tensor, strength: Tensor, saved: Tensor
) -> Tensor:
    """The refined rows' transpose times a gradient."""
    tensors = CallTensors(query, key, grad, strength)
    make = partial(plan_backward, only_values=True)
    plan = cached(_plans, ("value gradient", spec, *layout(tensors)), make, spec, tensors, grad, grad)
    dv = query.new_empty_strided(spec.states_shape, spec.gradient_strides)
    scratch = query.new_empty(plan.scratch or 0, dtype=torch.uint8)
    plan.launches(*kernel_tensors(tensors), grad, grad, saved, dv, dv, dv, strength, scratch)
    return dv

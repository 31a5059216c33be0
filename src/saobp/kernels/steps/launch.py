"""Several steps of propagation: tile sizes and launches of the sweeps, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels.bidirectional import sums
from saobp.kernels.bidirectional.launch import sweep_block
from saobp.kernels.call_spec import (
    Block,
    CallSpec,
    CallTensors,
    blocks,
    ceil_div,
    named_strides,
    next_power_of_2,
    strides,
)
from saobp.kernels.runtime.family import INPUT_NAMES, KernelFamily, LaunchPlan, Saved
from saobp.kernels.runtime.launcher import BufferSlice, LaunchSequence, lay_out_buffer
from saobp.kernels.steps import backward, forward, gradients

CAREFUL_PROGRAMS = 512
"""Programs of a CAREFUL sweep, about, but at least one for each head. With learned strengths every sweep is launched so too, and
mostly finds nothing to do; a program that only begins and ends takes about a microsecond, and two or three fit on a
multiprocessor."""


STEP_BLOCKS = {
    "step_rows": Block(64, 64, 4, 3, 168),
    "step_messages": Block(64, 64, 4, 3, 128),
    "step_row_sums": Block(64, 64, 4, 3, 168),
    "step_key_sums": Block(32, 64, 4, 3, 168),
    "step_query_gradient": Block(64, 64, 4, 3),
    "step_key_gradient": Block(64, 64, 4, 3),
}
"""Tiles for half types and heads up to 64."""


def step_block(spec: CallSpec, sweep: str) -> Block:
    """Tile of a sweep. Where registers are scarce it is that of a single step, which is then the same for every sweep."""
    if spec.dtype == torch.float32 or int(spec.dim) > 64:
        return sweep_block(spec, "row_sums")
    return STEP_BLOCKS[sweep]


def lowest_blocks(spec: CallSpec) -> int:
    """Blocks of rows of a head, each of which records its smallest normaliser in each step."""
    return ceil_div(spec.longest, step_block(spec, "step_rows").rows)


def saved_slices(spec: CallSpec) -> tuple[dict[str, BufferSlice], int]:
    """What the backward pass needs besides the output, a step's vectors right after those of the step before."""
    floats, rows = torch.float32, spec.rows_shape
    keys = rows if spec.receives else (0,)
    lowest = (spec.sequences * spec.heads * lowest_blocks(spec),)
    tile = min(sweep_block(spec, "column_messages").keys, step_block(spec, "step_messages").keys)
    shapes = {"message_sums": keys, "weight": keys, "anchor": rows, "norm": rows, "lowest": lowest}
    return lay_out_buffer("saved", {
        "lse": (spec.lse_shape, floats), "peak": ((spec.programs(tile) if spec.receives else 0,), floats),
        **{f"{name}_{step}": (shape, floats) for name, shape in shapes.items() for step in range(spec.steps)},
    }, alignment=4)  # fmt: skip


def saved_buffer(spec: CallSpec) -> Saved:
    return {"saved": ((saved_slices(spec)[1],), torch.uint8)}


def plan_forward(spec: CallSpec, tensors: CallTensors, _saves: bool) -> LaunchPlan:
    query, key, value, *_ = tensors
    launches = LaunchSequence(query.device, (*INPUT_NAMES, "out", "saved"), saved_slices(spec)[0])
    numbers = step_numbers(spec, query, key, value) | named_strides("o", spec.states_strides)
    block = sweep_block(spec, "row_sums")
    arguments = numbers | blocks(spec, block, block.rows, block.keys)
    launches.add(sums.row_sums, spec.programs(block.rows), arguments, senders="strength")
    for step in range(spec.steps):
        if spec.receives:
            _add_messages(launches, spec, numbers, step)
        arguments = {"STEP": step, "VALUES": step == spec.steps - 1}
        _add_sweep(launches, spec, forward.step_rows, numbers | arguments, by_rows=True)
    return LaunchPlan(launches)


def _add_messages(launches: LaunchSequence, spec: CallSpec, numbers: dict[str, Any], step: int) -> None:
    """c_t and weight_t for t = step; for t = 0 by the sweep of attention with a single step."""
    message_sums, weight = f"message_sums_{step}", f"weight_{step}"
    if step == 0:
        block = sweep_block(spec, "column_messages")
        arguments = numbers | blocks(spec, block, block.keys, block.rows) | {"MAPPED": False}
        launches.add(
            sums.column_messages, spec.programs(block.keys), arguments, message_sums=message_sums, senders="strength",
        )  # fmt: skip
    else:
        block = step_block(spec, "step_messages")
        arguments = numbers | {"STEP": step}
        _add_sweep(
            launches, spec, forward.step_messages, arguments, message_sums=message_sums,
            first_message_sums="message_sums_0",
        )  # fmt: skip
    count = ceil_div(spec.longest, block.keys)
    arguments = numbers | {"blocks": count, "KEYS": block.keys, "BLOCKS": next_power_of_2(count)}
    launches.add(
        sums.key_weights, spec.programs(block.keys), arguments, message_sums=message_sums, weight=weight
    )


def plan_backward(spec: CallSpec, tensors: CallTensors, grad: Tensor, _saved: Tensor) -> LaunchPlan:
    query, key, value, *_ = tensors
    stacks = {f"{name}_{step}" for name in ("delta", "sums_grad") for step in range(spec.steps)}
    vectors = (*sorted(stacks), "row_term")
    scratch, size = lay_out_buffer(
        "scratch", dict.fromkeys(vectors, (spec.rows_shape, torch.float32)), alignment=4
    )
    names = (*INPUT_NAMES, "grad", "saved", "dq", "dk", "dv", "strength_grad", "scratch")
    launches = LaunchSequence(query.device, names, saved_slices(spec)[0] | scratch)
    numbers = step_numbers(spec, query, key, value) | strides("g", grad)
    numbers |= named_strides("d", spec.gradient_strides)
    last = spec.steps - 1
    for step in range(last, -1, -1):
        _add_sweep(launches, spec, backward.step_row_sums, numbers | {"STEP": step}, by_rows=True)
        if spec.receives or step == last:
            _add_sweep(launches, spec, backward.step_key_sums, numbers | {"STEP": step})
    _add_sweep(launches, spec, gradients.step_query_gradient, numbers, by_rows=True)
    _add_sweep(launches, spec, gradients.step_key_gradient, numbers)
    return LaunchPlan(launches, size)


def _add_sweep(
    launches: LaunchSequence,
    spec: CallSpec,
    kernel: Any,
    numbers: dict[str, Any],
    *,
    by_rows: bool = False,
    **named: str,
) -> None:
    """Add a sweep, and where products may underflow its CAREFUL version, with c_t in place of weight_t."""
    block = step_block(spec, kernel.__name__)
    gridded, walked = (block.rows, block.keys) if by_rows else (block.keys, block.rows)
    arguments = numbers | blocks(spec, block, gridded, walked)
    stacks = {name: f"{name}_0" for name in ("anchor", "norm", "lowest", "delta", "sums_grad")}
    ways = [("weight_0", False), ("message_sums_0", True)] if spec.may_underflow else [("weight_0", False)]
    each = ceil_div(spec.programs(gridded), CAREFUL_PROGRAMS)
    programs = spec.sequences * spec.heads * ceil_div(arguments["blocks"], each)
    for key_part, careful in ways:
        launches.add(
            kernel,
            programs if careful else spec.programs(gridded),
            arguments | {"CAREFUL": careful, "blocks_each": each if careful else 1},
            **stacks | {"key_part": key_part} | named,
        )


def step_numbers(spec: CallSpec, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Arguments common to the sweeps."""
    lowest = lowest_blocks(spec)
    return {
        **strides("q", query), **strides("k", key), **strides("v", value), **spec.numbers, **spec.constants,
        **spec.drop_numbers, **spec.message_numbers, "plane": spec.low_plane, "low_plane": spec.low_plane,
        "scale": spec.scale, "damping": spec.damping, "lowest_sum": spec.lowest_sum, "lowest_blocks": lowest,
        "lowest_plane": spec.sequences * spec.heads * lowest, "LOWEST_BLOCKS": next_power_of_2(lowest),
        "STEPS": spec.steps, "COLUMNS": next_power_of_2(spec.steps), "DAMPED": spec.damping > 0,
        "CHECKED": spec.may_underflow, "RECEIVES": spec.receives, "PRECISE": spec.precise, "DROPS": spec.dropout > 0,
        "LEARNS": not spec.bound,
        "SHARED": spec.steps == 2 and spec.receives == 1 and not spec.damping and spec.precise != 2,
    }  # fmt: skip


STEPS = KernelFamily(
    "steps", "refined_steps", saved=saved_buffer, plan_forward=plan_forward, plan_backward=plan_backward,
    saves_output=False,
)  # fmt: skip

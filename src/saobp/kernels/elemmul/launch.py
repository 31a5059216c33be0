"""ElemMul: tile sizes and launches of the sweeps, forward and backward. It has neither strengths nor dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels.bidirectional import sums
from saobp.kernels.bidirectional.launch import BACKWARD_NAMES, sweep_block
from saobp.kernels.call_spec import Block, CallSpec, CallTensors, blocks, ceil_div, named_strides, strides
from saobp.kernels.elemmul import backward, centering, forward
from saobp.kernels.runtime.family import INPUT_NAMES, KernelFamily, LaunchPlan, Saved
from saobp.kernels.runtime.launcher import BufferSlice, LaunchSequence, lay_out_buffer


def elemmul_block(spec: CallSpec, sweep: str) -> Block:
    """Tile sizes, the largest that compile for Hopper with little register spilling; not tuned by time."""
    if spec.dtype == torch.float32:
        if spec.dim > 128:
            return Block(16, 16, 4, 1)
        return Block(32, 32, 8, 1) if spec.dim > 64 else Block(32, 32, 4, 2)
    small, middle, large = {
        "gathered_values": (Block(64, 128, 4, 3), Block(64, 64, 4, 2), Block(32, 64, 4, 2)),
        "elemmul_output": (Block(128, 64, 4, 3), Block(64, 64, 4, 2), Block(64, 32, 4, 2)),
        "gathered_gradient": (Block(64, 128, 8, 3), Block(64, 64, 4, 2), Block(32, 64, 4, 2)),
        "row_gradients": (Block(128, 64, 8, 2), Block(128, 32, 8, 2), Block(64, 32, 8, 2)),
        "elemmul_key_gradient": (Block(64, 128, 8, 2), Block(32, 128, 8, 2), Block(32, 64, 4, 1)),
    }[sweep]
    return small if spec.dim <= 64 else middle if spec.dim <= 128 else large


def saved_slices(spec: CallSpec) -> tuple[dict[str, BufferSlice], int]:
    """What the backward pass needs besides the output, in one buffer; a centre is as wide as a tile."""
    floats, rows = torch.float32, spec.rows_shape
    return lay_out_buffer("saved", {
        "gathered": (spec.states_shape, spec.dtype), "lse": (spec.lse_shape, floats),
        "received": (rows, floats), "inverse": (rows, floats), "centre": (centre_shape(spec), floats),
        "q_centre": (centre_shape(spec), floats), "level": ((spec.sequences, spec.heads, 2), floats),
    }, alignment=4)  # fmt: skip


def centre_shape(spec: CallSpec) -> tuple[int, int, int]:
    """One row per head of each sequence."""
    return spec.sequences, spec.heads, spec.constants["BLOCK_DIM"]


def saved_buffer(spec: CallSpec) -> Saved:
    return {"saved": ((saved_slices(spec)[1],), torch.uint8)}


def plan_forward(spec: CallSpec, tensors: CallTensors, _saves: bool) -> LaunchPlan:
    query, key, value, *_ = tensors
    launches = LaunchSequence(query.device, (*INPUT_NAMES, "out", "saved"), saved_slices(spec)[0])
    numbers = _numbers(spec, query, key, value) | {"ANCHORED": spec.dtype == torch.float16}
    block = sweep_block(spec, "row_sums")
    sizes = blocks(spec, block, block.rows, block.keys)
    launches.add(sums.row_sums, spec.programs(block.rows), numbers | sizes, senders="strength")
    _add_centres(launches, spec, centering.value_centres, numbers)
    _add_sweep(launches, spec, forward.gathered_values, numbers)
    _add_sweep(launches, spec, forward.elemmul_output, numbers, by_rows=True)
    return LaunchPlan(launches)


def plan_backward(spec: CallSpec, tensors: CallTensors, grad: Tensor, out: Tensor) -> LaunchPlan:
    query, key, value, *_ = tensors
    vectors = ("delta", "offset", "key_delta", "mass", "inverse_received", "prior_delta")
    scratch, size = lay_out_buffer("scratch", {
        "d_gathered": (spec.states_shape, query.dtype), "d_centre": (centre_shape(spec), torch.float32),
        "d_level": ((spec.sequences, spec.heads), torch.float32),
        **dict.fromkeys(vectors, (spec.rows_shape, torch.float32)),
    })  # fmt: skip
    launches = LaunchSequence(query.device, BACKWARD_NAMES, saved_slices(spec)[0] | scratch)
    numbers = _numbers(spec, query, key, value) | strides("g", grad)
    _add_centres(launches, spec, centering.gradient_centres, numbers)
    sizes = {**strides("o", out), "blocks": ceil_div(spec.longest, 64), "ROWS": 64}
    launches.add(backward.row_terms, spec.programs(64), numbers | sizes)
    _add_sweep(launches, spec, backward.gathered_gradient, numbers)
    _add_sweep(launches, spec, backward.row_gradients, numbers, by_rows=True)
    _add_sweep(launches, spec, backward.elemmul_key_gradient, numbers)
    return LaunchPlan(launches, size)


def _add_sweep(
    launches: LaunchSequence, spec: CallSpec, kernel: Any, numbers: dict[str, Any], *, by_rows: bool = False
) -> None:
    block = elemmul_block(spec, kernel.__name__)
    gridded = block.rows if by_rows else block.keys
    launches.add(kernel, spec.programs(gridded), numbers | blocks(spec, block, gridded))


def _add_centres(launches: LaunchSequence, spec: CallSpec, kernel: Any, numbers: dict[str, Any]) -> None:
    launches.add(kernel, spec.sequences * spec.heads, numbers | {"ROWS": 64})


def _numbers(spec: CallSpec, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Arguments common to the sweeps."""
    state_strides = spec.states_strides
    return {
        **strides("q", query), **strides("k", key), **strides("v", value),
        **named_strides("m", state_strides), **named_strides("o", state_strides), **named_strides("d", spec.gradient_strides),
        **spec.numbers, **spec.constants,
        "low_plane": spec.low_plane, "PRECISE": spec.precise, "scale": spec.scale,
    }  # fmt: skip


ELEMMUL = KernelFamily(
    "elemmul", "elemmul_attention", saved=saved_buffer, plan_forward=plan_forward, plan_backward=plan_backward,
    has_strength=False,
)  # fmt: skip

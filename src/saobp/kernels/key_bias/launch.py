"""Key bias from a part of the rows: tile sizes and launches of the sweeps, forward and backward."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from saobp.kernels.bidirectional import sums
from saobp.kernels.bidirectional.launch import sweep_block as long_block
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
from saobp.kernels.key_bias import backward, forward
from saobp.kernels.library.senders import find_senders
from saobp.kernels.masked.backward import row_products
from saobp.kernels.runtime.family import INPUT_NAMES, KernelFamily, LaunchPlan, Saved
from saobp.kernels.runtime.launcher import BufferSlice, LaunchSequence, kernels_for, lay_out_buffer
from saobp.kernels.runtime.two_streams import second_half_offsets

ANY_RANGE = torch.bfloat16
"""Type with the range of float32, so that no maximum of a row has to be subtracted."""
SENDERS_ONLY = ("row_sums", "column_messages", "sender_query_gradient", "sender_key_gradient")
"""Sweeps that take the sending rows alone."""
BY_ROWS = ("row_sums", "biased_output", "sender_query_gradient", "query_gradient")
"""Sweeps with a program per block of rows; the others have one per block of keys."""


def sweep_block(spec: CallSpec, sweep: str) -> Block:
    """Tile of a sweep. Under ``torch.compile`` the head size may be symbolic, hence ``int``."""
    if sweep in ("row_sums", "column_messages"):
        return long_block(spec, sweep)
    return _sweep_block(spec.dtype, int(spec.dim), sweep)


@lru_cache(maxsize=4096)
def _sweep_block(dtype: torch.dtype, dim: int, sweep: str) -> Block:
    """Not tuned on a GPU."""
    if dtype == torch.float32:
        return Block(32, 32, warps=4, stages=1)
    if dim > 128:
        return Block(32, 32, warps=4, stages=1)
    if dim > 64:
        return Block(64, 32, warps=4, stages=2)
    return {
        "biased_output": Block(128, 64, 4, 3),
        "key_value_gradient": Block(64, 64, 4, 3),
        "sender_query_gradient": Block(64, 64, 4, 3),
        "query_gradient": Block(64, 64, 4, 3),
        "sender_key_gradient": Block(64, 64, 4, 3),
    }[sweep]


def saved_slices(spec: CallSpec, buffer: str = "saved") -> tuple[dict[str, BufferSlice], int]:
    """Vectors per row and key that the output and the backward pass need, and the list of a padded batch's senders."""
    floats, rows = torch.float32, spec.rows_shape
    peaks = spec.programs(sweep_block(spec, "column_messages").keys)
    listed = spec.masked and spec.stride > 1
    return lay_out_buffer(buffer, {
        "lse": (spec.lse_shape, floats), "message_sums": (rows, floats), "belief": (spec.lse_shape, floats),
        "peak": ((peaks,), floats),
        "senders": ((spec.batch, spec.senders + 2) if listed else (0,), torch.int32),
        "sends": ((spec.batch, spec.length) if listed else (0,), torch.int32),
    }, alignment=4)  # fmt: skip


def saved_tensors(spec: CallSpec) -> Saved:
    """The vectors, and in half types the rounding error of the output."""
    rest = (0,) if spec.dtype == torch.float32 else spec.states_shape
    return {"saved": ((saved_slices(spec)[1],), torch.uint8), "rest": (rest, spec.dtype)}


def plan_forward(spec: CallSpec, tensors: CallTensors, saves: bool) -> LaunchPlan:
    buffer = "saved" if saves else "scratch"
    slices, size = saved_slices(spec, buffer)
    names = (*INPUT_NAMES, "out", *(("saved", "rest") if saves else ("scratch",)))
    launches = LaunchSequence(tensors.query.device, names, slices)
    peaks = ceil_div(spec.longest, sweep_block(spec, "column_messages").keys)
    numbers = _numbers(spec, tensors) | named_strides("o", spec.states_strides) | {
        "SAVES": saves, "ANCHORED": spec.dtype != ANY_RANGE, "peaks": peaks, "PEAKS": next_power_of_2(peaks),
    }  # fmt: skip
    if spec.masked and spec.stride > 1:
        launches.add(find_senders, spec.batch, numbers | {"SIZE": 1024})
    for sweep in (sums.row_sums, sums.column_messages, forward.biased_output):
        _add_sweep(launches, spec, sweep, numbers, **({} if saves else {"rest": "out"}))
    _in_two_streams(launches, spec, tensors, {}, slices, dict.fromkeys(("out", "rest"), spec.dtype))
    return LaunchPlan(launches, None if saves else size)


BACKWARD_NAMES = (*INPUT_NAMES, "grad", "out", "saved", "rest", "dq", "dk", "dv", "strength_grad", "scratch")


def plan_backward(spec: CallSpec, tensors: CallTensors, grad: Tensor, out: Tensor) -> LaunchPlan:
    rows = (spec.rows_shape, torch.float32)
    scratch, size = lay_out_buffer("scratch", {"delta": rows, "sums_grad": rows, "row_term": rows})
    slices = saved_slices(spec)[0] | scratch
    launches = LaunchSequence(tensors.query.device, BACKWARD_NAMES, slices)
    numbers = _numbers(spec, tensors) | strides("g", grad) | named_strides("d", spec.gradient_strides)
    sizes = {
        **strides("o", out), **named_strides("r", spec.states_strides), "blocks": ceil_div(spec.length, 64), "ROWS": 64,
    }  # fmt: skip
    launches.add(row_products, spec.batch * spec.heads * ceil_div(spec.length, 64), numbers | sizes)
    for sweep in (
        backward.key_value_gradient,
        backward.sender_query_gradient,
        backward.query_gradient,
        backward.sender_key_gradient,
    ):
        _add_sweep(launches, spec, sweep, numbers)
    gradients = dict.fromkeys(("dq", "dk", "dv"), spec.dtype)
    states = {"grad": grad, "out": out}
    _in_two_streams(launches, spec, tensors, states, slices, {"rest": spec.dtype}, gradients)
    return LaunchPlan(launches, size)


def _in_two_streams(
    launches: LaunchSequence, spec: CallSpec, tensors: CallTensors, states: dict[str, Tensor],
    slices: dict[str, BufferSlice], dtypes: dict[str, torch.dtype], gradients: dict[str, torch.dtype] | None = None,
) -> None:  # fmt: skip
    """Splits a long call's heads over two streams; not if its senders are listed, which heads of a sequence share."""
    states = {"q": tensors.query, "k": tensors.key, "v": tensors.value} | states
    axis = kernels_for("key bias", spec, *states.values()).split_axis
    offsets = second_half_offsets(spec, axis, tensors.strength, states, dtypes, slices, gradients=gradients)
    launches.in_two_streams(offsets)


def _add_sweep(
    launches: LaunchSequence, spec: CallSpec, sweep: Any, numbers: dict[str, Any], **named: str
) -> None:
    name = sweep.__name__
    block = sweep_block(spec, name)
    by_rows = name in BY_ROWS
    gridded, walked = (block.rows, block.keys) if by_rows else (block.keys, block.rows)
    sizes = blocks(spec, block, gridded, walked) | {"SPLIT": block.rows == 128 and block.warps == 4}
    if name in SENDERS_ONLY:
        if by_rows:
            sizes["blocks"] = ceil_div(ceil_div(spec.longest, spec.stride), gridded)
        else:
            listed = spec.packed or (spec.masked and spec.stride > 1)
            sizes["TAIL"] = listed or spec.senders % walked != 0
    launches.add(
        sweep, sizes["blocks"] * spec.sequences * spec.heads, numbers | sizes | {"MAPPED": False}, **named
    )


def _numbers(spec: CallSpec, tensors: CallTensors) -> dict[str, Any]:
    """Arguments common to the sweeps."""
    return {
        **strides("q", tensors.query), **strides("k", tensors.key), **strides("v", tensors.value), **spec.numbers,
        **spec.constants, **spec.drop_numbers, **spec.message_numbers, "low_plane": spec.low_plane, "scale": spec.scale,
        "PRECISE": spec.precise, "DROPS": spec.dropout > 0,
    }  # fmt: skip


KEY_BIAS = KernelFamily(
    "key bias", "key_bias_attention", saved=saved_tensors, plan_forward=plan_forward, plan_backward=plan_backward,
    inference="key_bias_output",
)  # fmt: skip

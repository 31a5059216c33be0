"""Bidirectional attention on short sequences: one launch forward, one backward, each program with a head's whole map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels.bidirectional import short, short_weak
from saobp.kernels.call_spec import (
    SHORT,
    Block,
    CallSpec,
    CallTensors,
    ceil_div,
    named_strides,
    padded_keys,
    resources,
    strides,
)
from saobp.kernels.hopper.launch import add_hopper_backward_launch, add_hopper_launch
from saobp.kernels.runtime.family import INPUT_NAMES, KernelFamily, LaunchPlan, Saved
from saobp.kernels.runtime.launcher import LaunchSequence, kernels_for, lay_out_buffer

WEAK_BLOCKS = {
    (64, 64): Block(64, 64, stages=1),
    (64, 128): Block(64, 64, stages=1),
    (128, 64): Block(64, 128, stages=1, registers=168),
    (128, 128): Block(64, 128, stages=1, registers=168),
}
"""Tiles of ``short_weak_forward`` by keys and largest head size.

Milliseconds for 2048 heads of 128 tokens on an H200: 0.058 as here, with three programs per multiprocessor; 0.067 with
four, which spill registers; 0.059 for all rows at once, in eight warps; 0.070 by ``short_forward``."""


CHECKED_HEADS = 16
"""Heads whose normalisers one program of ``short_careful_backward`` looks at."""


def saved_vectors(spec: CallSpec) -> Saved:
    """Shapes of lse and key_part, the sums of log messages, if rows receive any."""
    floats, rows = torch.float32, spec.rows_shape
    return {"lse": (rows, floats), "key_part": (rows if spec.receives else (0,), floats)}


def plan_forward(spec: CallSpec, tensors: CallTensors, saves: bool) -> LaunchPlan:
    query, key, value, *_ = tensors
    vectors = tuple(saved_vectors(spec))
    names = (*INPUT_NAMES, "out", *(vectors if saves else ()))
    choice = kernels_for("short", spec, query, key, value)
    unused = {} if saves else dict.fromkeys(vectors, "strength")
    if choice.hopper:
        needed = {"key_part": (spec.rows_shape, torch.float32)} if not (choice.weak or saves) else {}
        for name in needed:
            del unused[name]
        scratch, size = lay_out_buffer("scratch", needed)
        launches = LaunchSequence(query.device, (*names, "scratch") if needed else names, scratch)
        add_hopper_launch(launches, spec, query, key, value, saves, not choice.weak, unused)
        return LaunchPlan(launches, size if needed else None)
    launches = LaunchSequence(query.device, names, {})
    kernel = short_weak.short_weak_forward if choice.weak else short.short_forward
    block = weak_block(spec) if choice.weak else short_block(spec, backward=False)
    numbers = call_numbers(spec, tensors, block) | named_strides("o", spec.states_strides) | {"SAVES": saves}
    launches.add(kernel, spec.sequences * spec.heads, numbers, None, **unused)
    return LaunchPlan(launches)


def plan_backward(spec: CallSpec, tensors: CallTensors, grad: Tensor, _saved: Tensor) -> LaunchPlan:
    names = (*INPUT_NAMES, "grad", *saved_vectors(spec), "dq", "dk", "dv", "strength_grad")
    choice = kernels_for("short", spec, *tensors[:3], grad)
    numbers = call_numbers(spec, tensors, short_block(spec, backward=True)) | {"scale": spec.scale}
    numbers |= strides("g", grad) | named_strides("d", spec.gradient_strides)
    if choice.hopper:
        needed = {"totals": (spec.rows_shape, torch.float32)} if choice.careful else {}
        scratch, size = lay_out_buffer("scratch", needed)
        launches = LaunchSequence(grad.device, (*names, "scratch") if needed else names, scratch)
        unused = {} if needed else {"totals": "strength"}
        add_hopper_backward_launch(launches, spec, *tensors[:3], grad, unused)
        if choice.careful:
            lines = spec.sequences * spec.heads
            numbers |= {"lines": lines, "HEADS_EACH": CHECKED_HEADS}
            launches.add(short.short_careful_backward, ceil_div(lines, CHECKED_HEADS), numbers)
        return LaunchPlan(launches, size if needed else None)
    launches = LaunchSequence(grad.device, names, {})
    launches.add(short.short_backward, spec.sequences * spec.heads, numbers)
    return LaunchPlan(launches)


def weak_block(spec: CallSpec) -> Block:
    return WEAK_BLOCKS[padded_keys(spec), 64 if spec.dim <= 64 else 128]


def short_block(spec: CallSpec, backward: bool) -> Block:
    """The whole map at once: the fewest warps that hold it in registers, since column sums cost every warp the same."""
    keys = padded_keys(spec)
    large = keys == SHORT and (backward or spec.dim > 64)
    return Block(keys, keys, warps=8 if large else 4, stages=1)


def call_numbers(spec: CallSpec, tensors: CallTensors, block: Block) -> dict[str, Any]:
    return {
        **strides("q", tensors.query), **strides("k", tensors.key), **strides("v", tensors.value),
        **spec.numbers, **spec.constants, **spec.drop_numbers, **spec.message_numbers,
        "ROWS": block.rows, "KEYS": block.keys, "TAIL": spec.packed or spec.length != block.keys,
        "RECEIVES": spec.receives, "CAREFUL": spec.may_underflow, "PRECISE": spec.precise, "DROPS": spec.dropout > 0,
        **resources(block),
    }  # fmt: skip


SHORT_FAMILY = KernelFamily(
    "short", "short_refined_attention", saved=saved_vectors, plan_forward=plan_forward,
    plan_backward=plan_backward, saves_output=False, inference="short_refined_output",
)  # fmt: skip

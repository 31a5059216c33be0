"""Strict causal attention on short sequences: one launch forward, one backward, rows in at most two parts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saobp.kernels.bidirectional.short_launch import call_numbers
from saobp.kernels.call_spec import Block, CallSpec, CallTensors, named_strides, padded_keys, strides
from saobp.kernels.causal.short_backward import short_causal_backward
from saobp.kernels.causal.short_forward import short_causal_forward
from saobp.kernels.runtime.family import INPUT_NAMES, KernelFamily, LaunchPlan, Saved
from saobp.kernels.runtime.launcher import LaunchSequence

FORWARD, BACKWARD = Block(64, 128, stages=1, registers=168), Block(64, 128, stages=1)
"""Rows of a part, and keys of both parts. More warps would not split a part's tiles: each would compute all."""

LEAST_WIDTH = 64
"""Smaller heads are padded with zeros.

With Triton 3.6 on an H200, gradients of values were wrong where products are 16 numbers wide, and 32 read out of bounds."""


def plan_forward(spec: CallSpec, tensors: CallTensors, _saves: bool) -> LaunchPlan:
    launches = LaunchSequence(tensors.query.device, (*INPUT_NAMES, "out", "past"), {})
    block = parts(spec, FORWARD)
    numbers = call_numbers(spec, tensors, block) | named_strides("o", spec.states_strides)
    numbers |= {"SPLIT": block.rows < block.keys, "BLOCK_DIM": width(spec)}
    launches.add(short_causal_forward, spec.sequences * spec.heads, numbers)
    return LaunchPlan(launches)


def plan_backward(spec: CallSpec, tensors: CallTensors, grad: Tensor, _saved: Tensor) -> LaunchPlan:
    names = (*INPUT_NAMES, "grad", "past", "dq", "dk", "dv", "strength_grad")
    launches = LaunchSequence(grad.device, names, {})
    block = parts(spec, BACKWARD)
    numbers = (
        call_numbers(spec, tensors, block) | strides("g", grad) | named_strides("d", spec.gradient_strides)
    )
    numbers |= {"SPLIT": block.rows < block.keys, "BLOCK_DIM": width(spec), "scale": spec.scale}
    launches.add(short_causal_backward, spec.sequences * spec.heads, numbers)
    return LaunchPlan(launches)


def width(spec: CallSpec) -> int:
    """Padded head size."""
    return max(LEAST_WIDTH, spec.constants["BLOCK_DIM"])


def saved_past(spec: CallSpec) -> Saved:
    """The first part's sum of messages about its keys, if there is a second part that needs it."""
    needed = spec.receives and spec.longest > FORWARD.rows
    return {"past": ((spec.sequences, spec.heads, FORWARD.rows) if needed else (0,), torch.float32)}


def parts(spec: CallSpec, block: Block) -> Block:
    """The fewest rows and keys that cover the longest sequence; registers are capped for head sizes up to 64 only."""
    keys = min(block.keys, padded_keys(spec))
    registers = block.registers if spec.dim <= 64 else None
    return replace(block, rows=min(block.rows, keys), keys=keys, registers=registers)


SHORT_CAUSAL = KernelFamily(
    "short causal", "short_causal_refined_attention", saved=saved_past, plan_forward=plan_forward,
    plan_backward=plan_backward, saves_output=False,
)  # fmt: skip

"""Several steps on short sequences: one launch forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels.call_spec import (
    SHORT,
    Block,
    CallSpec,
    CallTensors,
    named_strides,
    padded_keys,
    resources,
    strides,
)
from saobp.kernels.runtime.family import INPUT_NAMES, KernelFamily, LaunchPlan, Saved
from saobp.kernels.runtime.launcher import LaunchSequence
from saobp.kernels.steps import short
from saobp.kernels.steps.launch import step_numbers


def saved_vectors(spec: CallSpec) -> Saved:
    return {"lse": (spec.rows_shape, torch.float32)}


def short_block(spec: CallSpec) -> Block:
    """The whole map at once; backward, where several maps are live, 16 warps spill more than 8."""
    keys = padded_keys(spec)
    return Block(keys, keys, warps=8 if keys == SHORT else 4, stages=1)


def plan_forward(spec: CallSpec, tensors: CallTensors, _saves: bool) -> LaunchPlan:
    launches = LaunchSequence(tensors.query.device, (*INPUT_NAMES, "out", *saved_vectors(spec)), {})
    numbers = _numbers(spec, tensors, short_block(spec))
    numbers |= named_strides("o", spec.states_strides)
    launches.add(short.short_steps_forward, spec.sequences * spec.heads, numbers)
    return LaunchPlan(launches)


def plan_backward(spec: CallSpec, tensors: CallTensors, grad: Tensor, _saved: Tensor) -> LaunchPlan:
    names = (*INPUT_NAMES, "grad", *saved_vectors(spec), "dq", "dk", "dv", "strength_grad")
    launches = LaunchSequence(grad.device, names, {})
    numbers = _numbers(spec, tensors, short_block(spec))
    numbers |= strides("g", grad) | named_strides("d", spec.gradient_strides)
    launches.add(short.short_steps_backward, spec.sequences * spec.heads, numbers)
    return LaunchPlan(launches)


def _numbers(spec: CallSpec, tensors: CallTensors, block: Block) -> dict[str, Any]:
    states = tensors.query, tensors.key, tensors.value
    tail = spec.packed or spec.length != block.keys
    return step_numbers(spec, *states) | {"KEYS": block.keys, "TAIL": tail, **resources(block)}


SHORT_STEPS = KernelFamily(
    "short steps", "short_refined_steps", saved=saved_vectors, plan_forward=plan_forward,
    plan_backward=plan_backward, saves_output=False,
)  # fmt: skip

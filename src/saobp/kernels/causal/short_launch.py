"""Short strict causal sequences: one launch forward, one backward, planned once for calls that look alike."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from saobp.kernels.bidirectional.short_launch import (
    Plan,
    all_keys,
    backward_plan,
    call_looks,
    call_numbers,
    filled_gradients,
)
from saobp.kernels.call_spec import Block, Problem, empty_states, given, strides
from saobp.kernels.causal import short_backward as short_causal_backward
from saobp.kernels.causal import short_forward as short_causal
from saobp.kernels.runtime.launcher import Launch, remembered

FORWARD, BACKWARD = Block(64, 128, stages=1, registers=168), Block(64, 128, stages=1)
"""Rows of a part, and keys of both parts. More warps would not share a part's tiles but each compute them all."""

LEAST_WIDTH = 64
"""Smaller heads are filled up with zeros.

With Triton 3.6 on an H200, gradients of values were wrong where products are 16 numbers wide, and 32 read out of bounds."""

_plans: dict[Hashable, Plan] = {}


def run_short_causal_forward(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and what the keys of the first of two parts hear from its rows."""
    numbers = (longest, scale, dropout, sign, hears, bound)
    looks = (*call_looks(query, key, value, strength, mask, cu, seed), *numbers)
    plan = remembered(
        _plans, looks, lambda: plan_forward(Problem.of(query, key, mask, cu, *numbers), query, key, value)
    )
    out = query.new_empty_strided(plan.sizes, plan.strides)
    past = query.new_empty(plan.vectors[0], dtype=torch.float32)
    plan.launch(
        query, key, value, out, given(mask, strength), given(cu, strength), given(seed, strength), strength, past,
    )  # fmt: skip
    return out, past


def run_short_causal_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, past: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma row by row."""
    numbers = (longest, scale, dropout, sign, hears, bound)
    plan = backward_plan(
        _plans, plan_backward, numbers, grad, query, key, value, strength, mask, cu, seed
    )  # fmt: skip
    return filled_gradients(
        plan, query, key, value, grad, given(mask, strength), given(cu, strength), given(seed, strength),
        strength, past,
    )  # fmt: skip


def plan_forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Plan:
    out = empty_states(problem, query)
    block = parts(problem, FORWARD)
    numbers = call_numbers(problem, query, key, value, block) | strides("o", out)
    numbers |= {"SPLIT": block.rows < block.keys, "BLOCK_DIM": width(problem)}
    kernel = short_causal.short_causal_forward
    launch = Launch(kernel, problem.sequences * problem.heads, numbers, query.device)
    return Plan(launch, out.shape, out.stride(), (past_shape(problem),))


def plan_backward(problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Plan:
    dq = empty_states(problem, query)
    block = parts(problem, BACKWARD)
    numbers = call_numbers(problem, query, key, value, block) | strides("g", grad) | strides("d", dq)
    numbers |= {"SPLIT": block.rows < block.keys, "BLOCK_DIM": width(problem), "scale": problem.scale}
    kernel = short_causal_backward.short_causal_backward
    launch = Launch(kernel, problem.sequences * problem.heads, numbers, query.device)
    return Plan(launch, dq.shape, dq.stride(), (problem.rows_shape,))


def width(problem: Problem) -> int:
    """Of products over a head's numbers."""
    return max(LEAST_WIDTH, problem.constants["BLOCK_DIM"])


def past_shape(problem: Problem) -> tuple[int, ...]:
    """One number per head and key of the first part, if there is a second one that hears it."""
    if not problem.hears or problem.longest <= FORWARD.rows:
        return (0,)
    return (problem.sequences, problem.heads, FORWARD.rows)


def parts(problem: Problem, block: Block) -> Block:
    """As few rows and keys as take in the longest sequence; a cap on registers is for head sizes up to 64."""
    keys = min(block.keys, all_keys(problem))
    registers = block.registers if problem.dim <= 64 else None
    return replace(block, rows=min(block.rows, keys), keys=keys, registers=registers)

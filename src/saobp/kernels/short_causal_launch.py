"""Short strict causal sequences: one launch forward, one backward, planned once for calls that look alike."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from saobp.kernels import short_causal, short_causal_backward
from saobp.kernels.problem import Block, Problem, empty_states, given, strides
from saobp.kernels.short_launch import Plan, all_keys, call_looks, call_numbers
from saobp.kernels.start import Launch, remembered

ROWS = 64
"""Rows of a part; with more tokens there are two parts."""

FORWARD_WARPS, BACKWARD_WARPS = 4, 4

_plans: dict[Hashable, Plan] = {}


def run_short_causal_forward(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and what the keys of the first of two parts hear from its rows."""
    numbers = (longest, scale, dropout, sign, hears, bound)
    looks = (*call_looks(query, key, value, strength, mask, cu, seed), *numbers)
    problem = Problem.of(query, key, mask, cu, *numbers)
    plan = remembered(_plans, looks, plan_forward, problem, query, key, value)
    out = query.new_empty_strided(plan.sizes, plan.strides)
    past = query.new_empty(plan.vectors[0], dtype=torch.float32)
    plan.launch(
        query,
        key,
        value,
        out,
        given(mask, strength),
        given(cu, strength),
        given(seed, strength),
        strength,
        past,
    )
    return out, past


def run_short_causal_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, past: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma row by row."""
    numbers = (longest, scale, dropout, sign, hears, bound)
    looks = (grad.stride(), grad.dtype, *call_looks(query, key, value, strength, mask, cu, seed), *numbers)
    problem = Problem.of(query, key, mask, cu, *numbers)
    plan = remembered(_plans, looks, plan_backward, problem, grad, query, key, value)
    dq, dk, dv = (query.new_empty_strided(plan.sizes, plan.strides) for _ in range(3))
    dgamma = query.new_empty(plan.vectors[0], dtype=torch.float32)
    plan.launch(
        query, key, value, grad, given(mask, strength), given(cu, strength), given(seed, strength), strength, past,
        dq, dk, dv, dgamma,
    )  # fmt: skip
    return dq, dk, dv, dgamma


def plan_forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Plan:
    out = empty_states(problem, query)
    block = causal_parts(problem, FORWARD_WARPS)
    numbers = call_numbers(problem, query, key, value, block) | strides("o", out)
    numbers |= {"SPLIT": block.rows < block.keys}
    kernel = short_causal.short_causal_forward
    launch = Launch(kernel, problem.sequences * problem.heads, numbers, query.device)
    return Plan(launch, out.shape, out.stride(), (past_shape(problem),))


def plan_backward(problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Plan:
    dq = empty_states(problem, query)
    block = causal_parts(problem, BACKWARD_WARPS)
    numbers = call_numbers(problem, query, key, value, block) | strides("g", grad) | strides("d", dq)
    numbers |= {"SPLIT": block.rows < block.keys, "scale": problem.scale}
    kernel = short_causal_backward.short_causal_backward
    launch = Launch(kernel, problem.sequences * problem.heads, numbers, query.device)
    return Plan(launch, dq.shape, dq.stride(), (problem.rows_shape,))


def past_shape(problem: Problem) -> tuple[int, ...]:
    """One number per head and key of the first part, if there is a second one that hears it."""
    return (problem.sequences, problem.heads, ROWS) if problem.hears and all_keys(problem) > ROWS else (0,)


def causal_parts(problem: Problem, warps: int) -> Block:
    """Rows of a part and keys of all parts."""
    keys = all_keys(problem)
    return Block(min(keys, ROWS), keys, warps=warps, stages=1)

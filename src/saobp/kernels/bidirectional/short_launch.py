"""Short sequences, not causal: one launch forward, one backward, planned once for calls that look alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saobp.kernels.bidirectional import short, short_weak
from saobp.kernels.call_spec import SHORT, Block, Problem, empty_states, given, next_power, resources, strides
from saobp.kernels.hopper.launch import hopper_launch, hopper_serves
from saobp.kernels.runtime.launcher import Launch, remembered

WEAK_BLOCKS = {
    (64, 64): Block(64, 64, stages=1),
    (64, 128): Block(64, 64, stages=1),
    (128, 64): Block(64, 128, stages=1, registers=168),
    (128, 128): Block(64, 128, stages=1, registers=168),
}
"""Tiles of ``short_weak_forward`` by keys and largest head size. Where there is no tile, ``short_forward`` takes its place.

Milliseconds of 2048 heads of 128 tokens on an H200: 0.058 as here, with three programs to a multiprocessor; 0.067 with a
fourth, whose registers spill; 0.059 for all rows at once, in eight warps; 0.070 by ``short_forward``."""


class Plan(NamedTuple):
    """What calls that look alike share: the launch, the layout of states that it fills, the shapes of vectors."""

    launch: Launch
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    vectors: tuple[tuple[int, ...], ...]


_plans: dict[Hashable, Plan] = {}


def run_short_forward(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
    *, saves: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output and, if it ``saves``, what the backward pass needs: lse, key_part, anchor."""
    numbers = (longest, scale, dropout, sign, hears, bound)
    aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15 == 0
    looks = (saves, aligned, *call_looks(query, key, value, strength, mask, cu, seed), *numbers)
    plan = remembered(
        _plans,
        looks,
        lambda: plan_forward(Problem.of(query, key, mask, cu, *numbers), query, key, value, saves),
    )
    out = query.new_empty_strided(plan.sizes, plan.strides)
    saved = [query.new_empty(shape, dtype=torch.float32) for shape in plan.vectors]
    lse, key_part, anchor = saved or (strength, strength, strength)
    plan.launch(
        query, key, value, out, given(mask, strength), given(cu, strength), given(seed, strength),
        lse, strength, key_part, anchor,
    )  # fmt: skip
    return out, *saved


def run_short_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, lse: Tensor, key_part: Tensor, anchor: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma row by row."""
    numbers = (longest, scale, dropout, sign, hears, bound)
    plan = backward_plan(
        _plans, plan_backward, numbers, grad, query, key, value, strength, mask, cu, seed
    )  # fmt: skip
    return filled_gradients(
        plan, query, key, value, grad, given(mask, strength), given(cu, strength), given(seed, strength),
        lse, strength, key_part, anchor,
    )  # fmt: skip


def backward_plan(
    shelf: dict[Hashable, Plan], make: Callable[..., Plan], numbers: tuple[Any, ...],
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
) -> Plan:  # fmt: skip
    """What lies on a shelf for backward calls that look like this one; made where nothing does."""
    looks = (grad.stride(), grad.dtype, *call_looks(query, key, value, strength, mask, cu, seed), *numbers)
    return remembered(
        shelf, looks, lambda: make(Problem.of(query, key, mask, cu, *numbers), grad, query, key, value)
    )


def filled_gradients(plan: Plan, query: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches a backward pass on its tensors, of which the last four are new: dq, dk, dv and gamma's row by row."""
    dq, dk, dv = (query.new_empty_strided(plan.sizes, plan.strides) for _ in range(3))
    dgamma = query.new_empty(plan.vectors[0], dtype=torch.float32)
    plan.launch(query, *others, dq, dk, dv, dgamma)
    return dq, dk, dv, dgamma


def call_looks(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
) -> tuple[Hashable, ...]:  # fmt: skip
    """All that a launch depends on in its tensors, but the alignment of their addresses."""
    return (
        query.shape, query.stride(), query.dtype, query.device,
        key.shape, key.stride(), key.dtype, key.device, value.stride(), value.dtype, value.device,
        strength.dtype, strength.device,
        mask if mask is None else (mask.dtype, mask.device),
        cu if cu is None else (cu.dtype, cu.device, cu.shape),
        seed if seed is None else (seed.dtype, seed.device),
    )  # fmt: skip


def plan_forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor, saves: bool) -> Plan:
    out = empty_states(problem, query)
    weak = weak_block(problem)
    vectors = saved_shapes(problem) if saves else ()
    if hopper_serves(problem, weak, query, key, value):
        return Plan(hopper_launch(problem, query, key, value, out, saves), out.shape, out.stride(), vectors)
    kernel = short_weak.short_weak_forward if weak else short.short_forward
    numbers = call_numbers(problem, query, key, value, weak or short_block(problem, backward=False))
    numbers |= strides("o", out) | {"SAVES": saves}
    launch = Launch(kernel, problem.sequences * problem.heads, numbers, query.device)
    return Plan(launch, out.shape, out.stride(), vectors)


def plan_backward(problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Plan:
    dq = empty_states(problem, query)
    numbers = call_numbers(problem, query, key, value, short_block(problem, backward=True))
    numbers |= strides("g", grad) | strides("d", dq)
    launch = Launch(
        short.short_backward,
        problem.sequences * problem.heads,
        numbers | {"scale": problem.scale},
        query.device,
    )
    return Plan(launch, dq.shape, dq.stride(), (problem.rows_shape,))


def saved_shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Of lse, key_part (what keys hear, or its exponential) and anchor; unused ones have no entry."""
    rows = problem.rows_shape
    return rows, rows if problem.hears else (0,), rows if problem.may_underflow else (0,)


def weak_block(problem: Problem) -> Block | None:
    """For the kernel of weak known strengths, where it serves: with fewer tokens its tiles would be mostly empty."""
    if problem.precise != 0 or problem.may_underflow:
        return None
    return WEAK_BLOCKS.get((all_keys(problem), 64 if problem.dim <= 64 else 128))


def all_keys(problem: Problem) -> int:
    """Keys of a tile that takes in the longest sequence."""
    return max(16, next_power(problem.longest))


def short_block(problem: Problem, backward: bool) -> Block:
    """The whole map at once: as few warps as can hold it in registers, since sums over rows cost each warp alike."""
    keys = all_keys(problem)
    large = keys == SHORT and (backward or problem.dim > 64)
    return Block(keys, keys, warps=8 if large else 4, stages=1)


def call_numbers(problem: Problem, query: Tensor, key: Tensor, value: Tensor, block: Block) -> dict[str, Any]:
    return {
        **strides("q", query), **strides("k", key), **strides("v", value),
        **problem.numbers, **problem.constants, **problem.drop_numbers, **problem.message_numbers,
        "ROWS": block.rows, "KEYS": block.keys, "TAIL": problem.packed or problem.length != block.keys,
        "HEARS": problem.hears, "CAREFUL": problem.may_underflow, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
        **resources(block),
    }  # fmt: skip

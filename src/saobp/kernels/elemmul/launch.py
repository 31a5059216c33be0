"""From tensors to the kernel calls of ElemMul, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels.bidirectional import sums
from saobp.kernels.bidirectional.launch import Plan, sweep_block
from saobp.kernels.call_spec import (
    Block,
    Problem,
    blocks,
    ceil_div,
    given,
    named_strides,
    strides,
    tensor_looks,
)
from saobp.kernels.elemmul import backward as elemmul_backward
from saobp.kernels.elemmul import centering as elemmul_centres
from saobp.kernels.elemmul import forward as elemmul
from saobp.kernels.runtime.launcher import Piece, Series, lay_out, remembered


def elemmul_problem(
    query: Tensor, key: Tensor, mask: Tensor | None, cu: Tensor | None, longest: int, scale: float
) -> Problem:
    """ElemMul has no strength and no dropout, and its rows do not speak in logarithms."""
    return Problem.of(query, key, mask, cu, longest, scale, dropout=0.0, sign=1.0, hears=False, bound=0.0)


def elemmul_block(problem: Problem, sweep: str) -> Block:
    """Tile sizes, the largest that compile for Hopper with next to no spilling; not tuned by time."""
    if problem.dtype == torch.float32:
        if problem.dim > 128:
            return Block(16, 16, 4, 1)
        return Block(32, 32, 8, 1) if problem.dim > 64 else Block(32, 32, 4, 2)
    small, middle, large = {
        "gathered_values": (Block(64, 128, 4, 3), Block(64, 64, 4, 2), Block(32, 64, 4, 2)),
        "elemmul_output": (Block(128, 64, 4, 3), Block(64, 64, 4, 2), Block(64, 32, 4, 2)),
        "gathered_gradient": (Block(64, 128, 8, 3), Block(64, 64, 4, 2), Block(32, 64, 4, 2)),
        "row_gradients": (Block(128, 64, 8, 2), Block(128, 32, 8, 2), Block(64, 32, 8, 2)),
        "elemmul_key_gradient": (Block(64, 128, 8, 2), Block(32, 128, 8, 2), Block(32, 64, 4, 1)),
    }[sweep]
    return small if problem.dim <= 64 else middle if problem.dim <= 128 else large


def saved_pieces(problem: Problem) -> tuple[dict[str, Piece], int]:
    """What the backward pass needs besides the output, in one buffer; a centre is as wide as a tile."""
    floats, rows = torch.float32, problem.rows_shape
    return lay_out("saved", {
        "gathered": (problem.states_shape, problem.dtype), "lse": (problem.lse_shape, floats),
        "received": (rows, floats), "inverse": (rows, floats), "centre": (centre_shape(problem), floats),
        "q_centre": (centre_shape(problem), floats), "level": ((problem.sequences, problem.heads, 2), floats),
    }, apart=4)  # fmt: skip


def centre_shape(problem: Problem) -> tuple[int, int, int]:
    """One row per head of each sequence."""
    return problem.sequences, problem.heads, problem.constants["BLOCK_DIM"]


def run_elemmul(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cu: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output, and in one buffer what the backward pass needs."""
    looks = ("elemmul", sweep_block, elemmul_block, *tensor_looks(query, key, value, None, mask, cu, None))
    plan = remembered(problem.plans, looks, plan_forward, problem, query, key, value)
    out = query.new_empty_strided(plan.sizes, plan.strides)
    saved = query.new_empty(plan.saved, dtype=torch.uint8)
    plan.series(query, key, value, given(mask, saved), given(cu, saved), out, saved)
    return out, saved


def plan_forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Plan:
    pieces, size = saved_pieces(problem)
    series = Series(query.device, ("q", "k", "v", "mask", "cu", "out", "saved"), pieces)
    numbers = _numbers(problem, query, key, value) | {"ANCHORED": problem.dtype == torch.float16}
    block = sweep_block(problem, "row_sums")
    own = blocks(problem, block, block.rows, block.keys)
    series.add(sums.row_sums, problem.programs(block.rows), numbers | own)
    _add_centres(series, problem, elemmul_centres.value_centres, numbers)
    _add_sweep(series, problem, elemmul.gathered_values, numbers)
    _add_sweep(series, problem, elemmul.elemmul_output, numbers, by_rows=True)
    return Plan(series, problem.states_shape, problem.states_strides, saved=size)


def run_elemmul_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cu: Tensor | None,
    out: Tensor, saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head."""
    looks = (
        "elemmul backward", elemmul_block, grad.stride(), grad.dtype, out.stride(),
        *tensor_looks(query, key, value, None, mask, cu, None),
    )  # fmt: skip
    plan = remembered(problem.plans, looks, plan_backward, problem, grad, query, key, value, out)
    dq, dk, dv = [query.new_empty_strided(plan.sizes, plan.strides) for _ in range(3)]
    scratch = query.new_empty(plan.scratch, dtype=torch.uint8)
    plan.series(
        query, key, value, given(mask, saved), given(cu, saved), grad, out, saved, dq, dk, dv, scratch
    )  # fmt: skip
    return dq, dk, dv


def plan_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor
) -> Plan:
    vectors = ("delta", "offset", "key_delta", "mass", "inverse_received", "prior_delta")
    scratch, size = lay_out("scratch", {
        "d_gathered": (problem.states_shape, query.dtype), "d_centre": (centre_shape(problem), torch.float32),
        "d_level": ((problem.sequences, problem.heads), torch.float32),
        **dict.fromkeys(vectors, (problem.rows_shape, torch.float32)),
    })  # fmt: skip
    tensors = ("q", "k", "v", "mask", "cu", "grad", "out", "saved", "dq", "dk", "dv", "scratch")
    series = Series(query.device, tensors, saved_pieces(problem)[0] | scratch)
    numbers = _numbers(problem, query, key, value) | strides("g", grad)
    _add_centres(series, problem, elemmul_centres.gradient_centres, numbers)
    own = {**strides("o", out), "blocks": ceil_div(problem.longest, 64), "ROWS": 64}
    series.add(elemmul_backward.row_terms, problem.programs(64), numbers | own)
    _add_sweep(series, problem, elemmul_backward.gathered_gradient, numbers)
    _add_sweep(series, problem, elemmul_backward.row_gradients, numbers, by_rows=True)
    _add_sweep(series, problem, elemmul_backward.elemmul_key_gradient, numbers)
    return Plan(series, problem.states_shape, problem.states_strides, scratch=size)


def _add_sweep(
    series: Series, problem: Problem, kernel: Any, numbers: dict[str, Any], *, by_rows: bool = False
) -> None:
    block = elemmul_block(problem, kernel.__name__)
    gridded = block.rows if by_rows else block.keys
    series.add(kernel, problem.programs(gridded), numbers | blocks(problem, block, gridded))


def _add_centres(series: Series, problem: Problem, kernel: Any, numbers: dict[str, Any]) -> None:
    series.add(kernel, problem.sequences * problem.heads, numbers | {"ROWS": 64})


def _numbers(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """What the sweeps share."""
    own = problem.states_strides
    return {
        **strides("q", query), **strides("k", key), **strides("v", value),
        **named_strides("m", own), **named_strides("o", own), **named_strides("d", own),
        **problem.numbers, **problem.constants,
        "low_plane": problem.low_plane, "PRECISE": problem.precise, "scale": problem.scale,
    }  # fmt: skip

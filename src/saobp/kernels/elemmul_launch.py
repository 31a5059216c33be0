"""From tensors to the kernel calls of ElemMul, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels import elemmul, elemmul_backward, sums
from saobp.kernels.launch import sweep_block
from saobp.kernels.problem import Block, Problem, blocks, ceil_div, empty_states, given, strides
from saobp.kernels.start import start_kernel


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


def run_elemmul(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cu: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output and what the backward pass needs: lse, centre, gathered, received, inverse."""
    out, gathered = (empty_states(problem, query) for _ in range(2))
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    lse = torch.empty(problem.lse_shape, **floats)
    received, inverse = (torch.empty(query.shape[:3], **floats) for _ in range(2))
    centre = torch.empty(centre_shape(problem), **floats)
    common = _common(problem, query, key, mask, cu, lse)

    block = sweep_block(problem, "row_sums")
    start_kernel(
        sums.row_sums,
        problem.programs(block.rows),
        **common,
        **blocks(problem, block, block.rows, block.keys),
    )
    _find_centre(problem, value, mask, cu, centre, REAL=True)
    gathers: dict[str, Any] = {
        "centre_ptr": centre, "gathered_ptr": gathered, "received_ptr": received, **strides("m", gathered),
        "ANCHORED": problem.dtype == torch.float16,
    }  # fmt: skip
    block = elemmul_block(problem, "gathered_values")
    start_kernel(
        elemmul.gathered_values,
        problem.programs(block.keys),
        **common,
        **gathers,
        **blocks(problem, block, block.keys),
        v_ptr=value,
        **strides("v", value),
    )
    block = elemmul_block(problem, "elemmul_output")
    start_kernel(
        elemmul.elemmul_output, problem.programs(block.rows),
        **common, **gathers, **blocks(problem, block, block.rows),
        out_ptr=out, inverse_ptr=inverse, **strides("o", out),
    )  # fmt: skip
    return out, lse, centre, gathered, received, inverse


def run_elemmul_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cu: Tensor | None,
    out: Tensor, lse: Tensor, centre: Tensor, gathered: Tensor, received: Tensor, inverse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head."""
    dq, dk, dv, d_gathered = (empty_states(problem, query) for _ in range(4))
    delta, offset, key_delta, mass, inverse_received, prior_delta = (torch.empty_like(inverse) for _ in range(6))  # fmt: skip
    d_centre = torch.empty_like(centre)
    _find_centre(problem, grad, mask, cu, d_centre, REAL=False)
    constants = problem.constants
    start_kernel(
        elemmul_backward.row_terms, problem.programs(64),
        grad_ptr=grad, out_ptr=out, v_ptr=value, cu_ptr=given(cu, lse), centre_ptr=centre, d_centre_ptr=d_centre,
        delta_ptr=delta, offset_ptr=offset, **strides("g", grad), **strides("o", out), **strides("v", value),
        heads=problem.heads, group=problem.group, length=problem.length, blocks=ceil_div(problem.longest, 64),
        ROWS=64, DIM=constants["DIM"], BLOCK_DIM=constants["BLOCK_DIM"], PACKED=problem.packed,
    )  # fmt: skip
    common = _common(problem, query, key, mask, cu, lse)
    common |= {
        "grad_ptr": grad, "received_ptr": received, "inverse_ptr": inverse, "delta_ptr": delta,
        "d_gathered_ptr": d_gathered, "key_delta_ptr": key_delta, "mass_ptr": mass, "inverse_received_ptr": inverse_received,
        **strides("g", grad), **strides("m", d_gathered),
    }  # fmt: skip
    block = elemmul_block(problem, "gathered_gradient")
    start_kernel(
        elemmul_backward.gathered_gradient,
        problem.programs(block.keys),
        **common,
        **blocks(problem, block, block.keys),
        centre_ptr=centre,
        d_centre_ptr=d_centre,
    )
    common |= {
        "offset_ptr": offset, "v_ptr": value, "gathered_ptr": gathered, "prior_delta_ptr": prior_delta, "scale": problem.scale,
        **strides("v", value), **strides("d", dq),
    }  # fmt: skip
    block = elemmul_block(problem, "row_gradients")
    start_kernel(
        elemmul_backward.row_gradients,
        problem.programs(block.rows),
        **common,
        **blocks(problem, block, block.rows),
        d_centre_ptr=d_centre,
        dq_ptr=dq,
        dv_ptr=dv,
    )
    block = elemmul_block(problem, "elemmul_key_gradient")
    start_kernel(
        elemmul_backward.elemmul_key_gradient,
        problem.programs(block.keys),
        **common,
        **blocks(problem, block, block.keys),
        dk_ptr=dk,
    )
    return dq, dk, dv


def centre_shape(problem: Problem) -> tuple[int, int, int]:
    """One row per head of each sequence, as wide as a tile."""
    return problem.sequences, problem.heads, problem.constants["BLOCK_DIM"]


def _find_centre(
    problem: Problem, states: Tensor, mask: Tensor | None, cu: Tensor | None, centre: Tensor, REAL: bool
) -> None:
    constants = problem.constants
    start_kernel(
        elemmul.centres, problem.sequences * problem.heads,
        x_ptr=states, mask_ptr=given(mask, centre), cu_ptr=given(cu, centre), centre_ptr=centre,
        **strides("x", states), heads=problem.heads, group=problem.heads // states.shape[1], length=problem.length,
        DIM=constants["DIM"], BLOCK_DIM=constants["BLOCK_DIM"], ROWS=64, REAL=REAL,
        MASKED=problem.masked, PACKED=problem.packed,
    )  # fmt: skip


def _common(
    problem: Problem, query: Tensor, key: Tensor, mask: Tensor | None, cu: Tensor | None, lse: Tensor
) -> dict[str, Any]:
    """What every sweep needs to find its sequence and recompute the prior rows."""
    return {
        "q_ptr": query, "k_ptr": key, "mask_ptr": given(mask, lse), "cu_ptr": given(cu, lse), "lse_ptr": lse,
        **strides("q", query), **strides("k", key), **problem.numbers, **problem.constants,
        "low_plane": problem.low_plane, "PRECISE": problem.precise,
    }  # fmt: skip

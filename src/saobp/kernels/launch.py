"""Long sequences, not causal: sizes of the sweeps and their launches, forward and backward."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from saobp.kernels import backward, forward
from saobp.kernels.problem import Block, Problem, blocks, ceil_div, empty_states, given, next_power, strides
from saobp.kernels.start import start_kernel


def sweep_block(problem: Problem, sweep: str) -> Block:
    return _sweep_block(problem.dtype, problem.dim, sweep)


@lru_cache(maxsize=4096)
def _sweep_block(dtype: torch.dtype, dim: int, sweep: str) -> Block:
    """Tile sizes found by ``benchmarks/tune_sweeps.py`` on an H200; small ones where registers are short."""
    if dtype == torch.float32:
        return Block(32, 32, warps=4, stages=1) if dim > 64 else Block(64, 32, warps=4, stages=2)
    if dim > 128:
        return Block(64, 32, warps=4, stages=2)
    if dim > 64:
        return Block(64, 64, warps=4, stages=2)
    return {
        "row_sums": Block(64, 64, 4, 3),
        "column_messages": Block(64, 128, 4, 3),
        "refined_output": Block(64, 128, 4, 2, 168),
        "value_gradient": Block(32, 128, 4, 3, 168),
        "query_gradient": Block(128, 64, 8, 3),
        "key_gradient": Block(64, 64, 4, 3, 168),
    }[sweep]


def lowest_blocks(problem: Problem) -> int:
    """How many blocks of rows of a head note their smallest normaliser."""
    return ceil_div(problem.longest, sweep_block(problem, "refined_output").rows)


def run_forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output and what the backward pass needs: lse, heard, weight, anchor, inverse, lowest."""
    out = empty_states(problem, query)
    tensors: dict[str, Any] = {
        "q_ptr": query, "k_ptr": key, "mask_ptr": given(mask, strength), "cu_ptr": given(cu, strength),
        **strides("q", query), **strides("k", key),
    }  # fmt: skip
    messages = problem.message_numbers
    output: dict[str, Any] = {
        "v_ptr": value,
        "out_ptr": out,
        "strength_ptr": strength,
        "seed_ptr": given(seed, strength),
    }
    output |= {**strides("v", value), **strides("o", out), **problem.drop_numbers, **messages}
    flags = {"HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0}
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    rows_shape = problem.rows_shape
    lse, anchor, inverse = (
        torch.empty(shape, **floats) for shape in (problem.lse_shape, rows_shape, rows_shape)
    )
    lowest = torch.empty(problem.sequences * problem.heads * lowest_blocks(problem), **floats)
    heard, weight = (torch.empty(rows_shape if problem.hears else 0, **floats) for _ in range(2))
    rows_parts: dict[str, Any] = {
        "lse_ptr": lse,
        "low_plane": problem.low_plane,
        "heard_ptr": heard,
        "weight_ptr": weight,
    }
    rows_parts |= {"anchor_ptr": anchor, "inverse_ptr": inverse, "lowest_ptr": lowest}
    block = sweep_block(problem, "row_sums")
    start_kernel(
        forward.row_sums,
        problem.programs(block.rows),
        **tensors,
        **problem.numbers,
        **problem.constants,
        **blocks(problem, block, block.rows, block.keys),
        lse_ptr=lse,
        low_plane=problem.low_plane,
        PRECISE=problem.precise,
    )
    if problem.hears:
        block = sweep_block(problem, "column_messages")
        count = ceil_div(problem.longest, block.keys)
        peak = torch.empty(problem.programs(block.keys), **floats)
        start_kernel(
            forward.column_messages, problem.programs(block.keys),
            **tensors, **problem.numbers, **problem.constants, **blocks(problem, block, block.keys, block.rows), **messages,
            lse_ptr=lse, low_plane=problem.low_plane, strength_ptr=strength, heard_ptr=heard, peak_ptr=peak,
            PRECISE=problem.precise,
        )  # fmt: skip
        start_kernel(
            forward.key_weights, problem.programs(block.keys),
            heard_ptr=heard, peak_ptr=peak, weight_ptr=weight, cu_ptr=given(cu, strength), heads=problem.heads,
            length=problem.length, blocks=count, KEYS=block.keys, BLOCKS=next_power(count),
            PACKED=problem.packed,
        )  # fmt: skip
    block = sweep_block(problem, "refined_output")
    start_kernel(
        forward.refined_output, problem.programs(block.rows),
        **tensors, **output, **flags, **problem.numbers, **problem.constants,
        **blocks(problem, block, block.rows, block.keys), **rows_parts,
    )  # fmt: skip
    run_careful(problem, block.rows, tensors | output | rows_parts)
    return out, lse, heard, weight, anchor, inverse, lowest


def run_careful(problem: Problem, rows: int, arguments: dict[str, Any]) -> None:
    """Repeats what underflowed."""
    if problem.may_underflow:
        block = Block(rows, 32, stages=1)
        start_kernel(
            forward.careful_output, problem.programs(rows),
            **arguments, **problem.numbers, **problem.constants, **blocks(problem, block, rows, 32),
            lowest_sum=problem.lowest_sum, PRECISE=problem.precise, DROPS=problem.dropout > 0,
        )  # fmt: skip


def run_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, heard: Tensor, weight: Tensor, anchor: Tensor, inverse: Tensor, lowest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma in parts ``[..., heads, ...]``."""
    dq, dk, dv = (empty_states(problem, query) for _ in range(3))
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    common: dict[str, Any] = {
        "q_ptr": query, "k_ptr": key, "v_ptr": value, "grad_ptr": grad, "strength_ptr": strength,
        "mask_ptr": given(mask, strength), "cu_ptr": given(cu, strength), "seed_ptr": given(seed, strength),
        **strides("q", query), **strides("k", key), **strides("v", value), **strides("g", grad), **strides("d", dq),
        **problem.numbers, **problem.constants, **problem.drop_numbers, **problem.message_numbers,
        "scale": problem.scale, "HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
    }  # fmt: skip
    rows_shape = problem.rows_shape
    delta, scaled, heard_grad, dgamma, row_term = (torch.empty(rows_shape, **floats) for _ in range(5))
    constants = problem.constants
    start_kernel(
        backward.row_products, problem.programs(128),
        grad_ptr=grad, out_ptr=out, cu_ptr=given(cu, strength), inverse_ptr=inverse, delta_ptr=delta, scaled_ptr=scaled,
        **strides("g", grad), **strides("o", out),
        heads=problem.heads, length=problem.length, blocks=ceil_div(problem.longest, 128), ROWS=128,
        DIM=constants["DIM"], BLOCK_DIM=constants["BLOCK_DIM"], SCALED=True, PACKED=problem.packed,
    )  # fmt: skip
    common |= {
        "lse_ptr": lse, "low_plane": problem.low_plane, "lowest_ptr": lowest, "lowest_blocks": lowest_blocks(problem),
        "LOWEST_BLOCKS": next_power(lowest_blocks(problem)), "lowest_sum": problem.lowest_sum, "anchor_ptr": anchor, "inverse_ptr": inverse,
        "CHECKED": problem.may_underflow,
    }  # fmt: skip
    fast = {"key_part_ptr": weight, "CAREFUL": False}
    careful = {"key_part_ptr": heard, "CAREFUL": True}
    ways = (fast, careful) if problem.may_underflow else (fast,)
    block = sweep_block(problem, "value_gradient")
    for way in ways:
        start_kernel(
            backward.value_gradient, problem.programs(block.keys),
            **common, **way, **blocks(problem, block, block.keys, block.rows),
            delta_ptr=delta, dv_ptr=dv, heard_grad_ptr=heard_grad,
        )  # fmt: skip
    common |= {"heard_grad_ptr": heard_grad, "row_term_ptr": row_term}
    block = sweep_block(problem, "query_gradient")
    for part in (0,) if problem.precise == 0 else (1, 2):
        for way in ways:
            start_kernel(
                backward.query_gradient, problem.programs(block.rows),
                **common, **way, **blocks(problem, block, block.rows, block.keys), PART=part,
                delta_ptr=scaled, dq_ptr=dq, strength_grad_ptr=dgamma,
            )  # fmt: skip
    block = sweep_block(problem, "key_gradient")
    for way in ways:
        start_kernel(
            backward.key_gradient, problem.programs(block.keys),
            **common, **way, **blocks(problem, block, block.keys, block.rows),
            delta_ptr=scaled, dk_ptr=dk,
        )  # fmt: skip
    return dq, dk, dv, dgamma

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
    sums = run_sums(problem, query, key, strength, mask, cu)
    out, *rows = run_output(problem, query, key, value, strength, mask, cu, seed, *sums)
    return out, *sums, *rows  # type: ignore[return-value]


def run_sums(
    problem: Problem, query: Tensor, key: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What does not depend on values: lse of the rows, heard and weight of the keys."""
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    lse = torch.empty(problem.lse_shape, **floats)
    heard, weight = (torch.empty(problem.rows_shape if problem.hears else 0, **floats) for _ in range(2))
    common = _scores(problem, query, key, strength, mask, cu)
    common |= {"lse_ptr": lse, "low_plane": problem.low_plane, "PRECISE": problem.precise}
    block = sweep_block(problem, "row_sums")
    start_kernel(
        forward.row_sums, problem.programs(block.rows), **common, **blocks(problem, block, block.rows, block.keys)
    )  # fmt: skip
    if problem.hears:
        block = sweep_block(problem, "column_messages")
        count = ceil_div(problem.longest, block.keys)
        peak = torch.empty(problem.programs(block.keys), **floats)
        start_kernel(
            forward.column_messages, problem.programs(block.keys),
            **common, **blocks(problem, block, block.keys, block.rows), **problem.message_numbers,
            strength_ptr=strength, heard_ptr=heard, peak_ptr=peak,
        )  # fmt: skip
        start_kernel(
            forward.key_weights, problem.programs(block.keys),
            heard_ptr=heard, peak_ptr=peak, weight_ptr=weight, cu_ptr=given(cu, strength), heads=problem.heads,
            length=problem.length, blocks=count, KEYS=block.keys, BLOCKS=next_power(count),
            PACKED=problem.packed,
        )  # fmt: skip
    return lse, heard, weight


def run_output(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None, lse: Tensor, heard: Tensor, weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Refined rows times values, and of the rows: anchor, inverse, lowest."""
    out = empty_states(problem, query)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    anchor, inverse = (torch.empty(problem.rows_shape, **floats) for _ in range(2))
    lowest = torch.empty(problem.sequences * problem.heads * lowest_blocks(problem), **floats)
    common = _scores(problem, query, key, strength, mask, cu) | {
        "v_ptr": value, "out_ptr": out, "strength_ptr": strength, "seed_ptr": given(seed, strength),
        "lse_ptr": lse, "heard_ptr": heard, "weight_ptr": weight,
        "anchor_ptr": anchor, "inverse_ptr": inverse, "lowest_ptr": lowest,
        **strides("v", value), **strides("o", out), **problem.drop_numbers, **problem.message_numbers,
        "low_plane": problem.low_plane, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
    }  # fmt: skip
    block = sweep_block(problem, "refined_output")
    start_kernel(
        forward.refined_output, problem.programs(block.rows),
        **common, **blocks(problem, block, block.rows, block.keys), HEARS=problem.hears,
    )  # fmt: skip
    if problem.may_underflow:  # repeats what did
        rows = block.rows
        start_kernel(
            forward.careful_output, problem.programs(rows),
            **common, **blocks(problem, Block(rows, 32, stages=1), rows, 32), lowest_sum=problem.lowest_sum,
        )  # fmt: skip
    return out, anchor, inverse, lowest


def _scores(
    problem: Problem, query: Tensor, key: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None
) -> dict[str, Any]:
    """What every sweep needs to recompute scores."""
    return {
        "q_ptr": query, "k_ptr": key, "mask_ptr": given(mask, strength), "cu_ptr": given(cu, strength),
        **strides("q", query), **strides("k", key), **problem.numbers, **problem.constants,
    }  # fmt: skip


def run_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, heard: Tensor, weight: Tensor, anchor: Tensor, inverse: Tensor, lowest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma in parts ``[..., heads, ...]``."""
    dq, dk = (empty_states(problem, query) for _ in range(2))
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
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
    states = (grad, query, key, value, strength, mask, cu, seed)
    dv = run_value_gradient(problem, *states, lse, heard, weight, anchor, inverse, lowest, delta, heard_grad)
    common, ways = _gradients(problem, *states, lse, heard, weight, anchor, inverse, lowest)
    common |= strides("d", dq)
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


def run_value_gradient(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
    lse: Tensor, heard: Tensor, weight: Tensor, anchor: Tensor, inverse: Tensor, lowest: Tensor,
    delta: Tensor, heard_grad: Tensor,
) -> Tensor:  # fmt: skip
    """dv, the refined rows' transpose times grad; fills heard_grad from delta on the way."""
    dv = empty_states(problem, query)
    common, ways = _gradients(
        problem,
        grad,
        query,
        key,
        value,
        strength,
        mask,
        cu,
        seed,
        lse,
        heard,
        weight,
        anchor,
        inverse,
        lowest,
    )
    block = sweep_block(problem, "value_gradient")
    for way in ways:
        start_kernel(
            backward.value_gradient, problem.programs(block.keys),
            **common, **way, **strides("d", dv), **blocks(problem, block, block.keys, block.rows),
            delta_ptr=delta, dv_ptr=dv, heard_grad_ptr=heard_grad,
        )  # fmt: skip
    return dv


def _gradients(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
    lse: Tensor, heard: Tensor, weight: Tensor, anchor: Tensor, inverse: Tensor, lowest: Tensor,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """What every backward sweep needs, and the ways in which it is launched."""
    common = _scores(problem, query, key, strength, mask, cu) | {
        "v_ptr": value, "grad_ptr": grad, "strength_ptr": strength, "seed_ptr": given(seed, strength),
        **strides("v", value), **strides("g", grad), **problem.drop_numbers, **problem.message_numbers,
        "scale": problem.scale, "HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
        "lse_ptr": lse, "low_plane": problem.low_plane, "anchor_ptr": anchor, "inverse_ptr": inverse,
        "lowest_ptr": lowest, "lowest_blocks": lowest_blocks(problem), "LOWEST_BLOCKS": next_power(lowest_blocks(problem)),
        "lowest_sum": problem.lowest_sum, "CHECKED": problem.may_underflow,
    }  # fmt: skip
    ways: list[dict[str, Any]] = [{"key_part_ptr": weight, "CAREFUL": False}]
    if problem.may_underflow:
        ways.append({"key_part_ptr": heard, "CAREFUL": True})
    return common, ways

"""Long sequences, not causal: sizes of the sweeps and their launches, forward and backward."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saobp.kernels import backward, forward, gradient_parts, sums
from saobp.kernels.problem import Block, Problem, blocks, ceil_div, empty_states, given, next_power, strides
from saobp.kernels.start import start_kernel


def sweep_block(problem: Problem, sweep: str) -> Block:
    """The compiler's symbol for a head size becomes the number it stands for: tiles depend on it."""
    return _sweep_block(problem.dtype, int(problem.dim), sweep)


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
        "column_messages": Block(64, 128, 4, 2),
        "refined_output": Block(128, 64, 4, 3),
        "value_gradient": Block(32, 128, 4, 3, 168),
        "query_gradient": Block(64, 64, 4, 3, 168),
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
    known = run_sums(problem, query, key, strength, mask, cu)
    out, *rows = run_output(problem, query, key, value, strength, mask, cu, seed, *known)
    return out, *known, *rows  # type: ignore[return-value]


def run_sums(
    problem: Problem, query: Tensor, key: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What does not depend on values: lse of the rows, heard and weight of the keys."""
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    lse = torch.empty(problem.lse_shape, **floats)
    keys_shape = problem.rows_shape if problem.hears else 0
    heard = torch.empty(keys_shape, **floats)
    weight = torch.empty(keys_shape, dtype=problem.weight_dtype, device=query.device)
    common = _scores(problem, query, key, strength, mask, cu)
    common |= {"lse_ptr": lse, "low_plane": problem.low_plane, "PRECISE": problem.precise}
    block = sweep_block(problem, "row_sums")
    start_kernel(
        sums.row_sums, problem.programs(block.rows), **common, **blocks(problem, block, block.rows, block.keys)
    )  # fmt: skip
    if problem.hears:
        block = sweep_block(problem, "column_messages")
        count = ceil_div(problem.longest, block.keys)
        peak = torch.empty(problem.programs(block.keys), **floats)
        start_kernel(
            sums.column_messages, problem.programs(block.keys),
            **common, **blocks(problem, block, block.keys, block.rows), **problem.message_numbers,
            strength_ptr=strength, heard_ptr=heard, peak_ptr=peak,
        )  # fmt: skip
        start_kernel(
            sums.key_weights, problem.programs(block.keys),
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
    dgamma, row_term = (torch.empty(problem.rows_shape, **floats) for _ in range(2))
    states = (query, key, value, strength, mask, cu, seed, lse, heard, weight, anchor, inverse, lowest)
    scaled = scale_gradient(problem, grad, out, inverse, cu)
    dv, heard_grads = run_value_gradient(problem, scaled, *states)
    common, ways = _gradients(problem, scaled, *states)
    common |= strides("d", dq) | {"row_term_ptr": row_term}
    block = sweep_block(problem, "query_gradient")
    for way in ways:
        start_kernel(
            backward.query_gradient, problem.programs(block.rows),
            **common, **way, **blocks(problem, block, block.rows, block.keys), **heard_grads,
            inverse_ptr=inverse, dq_ptr=dq, strength_grad_ptr=dgamma,
        )  # fmt: skip
    block = sweep_block(problem, "key_gradient")
    for way in ways:
        start_kernel(
            backward.key_gradient, problem.programs(block.keys),
            **common, **way, **blocks(problem, block, block.keys, block.rows),
            heard_grad_ptr=heard_grads["heard_grad_ptr"], dk_ptr=dk,
        )  # fmt: skip
    return dq, dk, dv, dgamma


class ScaledGradient(NamedTuple):
    """The output's gradient over the rows' normalisers; D of that, also in parts; powers of two kept apart."""

    gradient: Tensor
    delta: Tensor
    parts: Tensor
    power: Tensor


PARTS = 16
"""Columns of D's parts: the least that a product on the tensor cores takes."""


def scale_gradient(
    problem: Problem, grad: Tensor, out: Tensor, inverse: Tensor, cu: Tensor | None
) -> ScaledGradient:
    floats: dict[str, Any] = {"dtype": torch.float32, "device": grad.device}
    gradient = empty_states(problem, grad)
    delta = torch.empty(problem.rows_shape, **floats)
    parts = torch.empty((*problem.rows_shape, PARTS), dtype=grad.dtype, device=grad.device)
    power = torch.empty(problem.rows_shape if problem.splits_inverse else 0, **floats)
    start_kernel(
        gradient_parts.scaled_gradients, problem.programs(128),
        grad_ptr=grad, out_ptr=out, cu_ptr=given(cu, inverse), inverse_ptr=inverse,
        scaled_ptr=gradient, delta_ptr=delta, parts_ptr=parts, power_ptr=power,
        **strides("g", grad), **strides("o", out), **strides("s", gradient), part_row=PARTS,
        heads=problem.heads, length=problem.length, blocks=ceil_div(problem.longest, 128), ROWS=128,
        DIM=problem.dim, BLOCK_DIM=problem.constants["BLOCK_DIM"], PACKED=problem.packed,
        POWER=problem.splits_inverse, PRECISE=problem.precise,
    )  # fmt: skip
    return ScaledGradient(gradient, delta, parts, power)


def run_value_gradient(
    problem: Problem, scaled: ScaledGradient, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
    lse: Tensor, heard: Tensor, weight: Tensor, anchor: Tensor, inverse: Tensor, lowest: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """dv, the refined rows' transpose times the gradient, and the gradients of what keys hear, by argument name."""
    dv = empty_states(problem, query)
    common, ways = _gradients(
        problem, scaled, query, key, value, strength, mask, cu, seed, lse, heard, weight, anchor, inverse, lowest
    )  # fmt: skip
    heard_grads = {
        "heard_grad_ptr": torch.empty(problem.rows_shape, dtype=torch.float32, device=query.device),
        "heard_half_ptr": torch.empty(
            problem.rows_shape if problem.precise == 0 else 0, dtype=query.dtype, device=query.device
        ),
    }
    block = sweep_block(problem, "value_gradient")
    for way in ways:
        start_kernel(
            backward.value_gradient, problem.programs(block.keys),
            **common, **way, **strides("d", dv), **blocks(problem, block, block.keys, block.rows), **heard_grads,
            parts_ptr=scaled.parts, part_row=PARTS, dv_ptr=dv,
        )  # fmt: skip
    return dv, heard_grads


def _gradients(
    problem: Problem, scaled: ScaledGradient, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
    lse: Tensor, heard: Tensor, weight: Tensor, anchor: Tensor, inverse: Tensor, lowest: Tensor,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """What every backward sweep needs, and the ways in which it is launched."""
    common = _scores(problem, query, key, strength, mask, cu) | {
        "v_ptr": value, "grad_ptr": scaled.gradient, "strength_ptr": strength, "seed_ptr": given(seed, strength),
        **strides("v", value), **strides("g", scaled.gradient), **problem.drop_numbers, **problem.message_numbers,
        "scale": problem.scale, "HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
        "lse_ptr": lse, "low_plane": problem.low_plane, "anchor_ptr": anchor, "delta_ptr": scaled.delta,
        "power_ptr": scaled.power, "POWER": problem.splits_inverse,
        "lowest_ptr": lowest, "lowest_blocks": lowest_blocks(problem), "LOWEST_BLOCKS": next_power(lowest_blocks(problem)),
        "lowest_sum": problem.lowest_sum, "CHECKED": problem.may_underflow,
    }  # fmt: skip
    ways: list[dict[str, Any]] = [{"key_part_ptr": weight, "CAREFUL": False}]
    if problem.may_underflow:
        ways.append({"key_part_ptr": heard, "CAREFUL": True})
    return common, ways

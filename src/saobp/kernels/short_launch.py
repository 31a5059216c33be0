"""Short sequences, not causal: one launch forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels import short
from saobp.kernels.problem import SHORT, Block, Problem, empty_states, given, next_power, resources, strides
from saobp.kernels.start import start_kernel


def short_block(problem: Problem, backward: bool) -> Block:
    """The whole map at once: as few warps as can hold it in registers, since sums over rows cost each warp alike."""
    keys = max(16, next_power(problem.longest))
    large = keys == SHORT and (backward or problem.dim > 64)
    return Block(keys, keys, warps=8 if large else 4, stages=1)


def run_short_forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output and what the backward pass needs: lse, key_part, anchor."""
    out = empty_states(problem, query)
    lse, key_part, anchor = saved_vectors(problem, query)
    start_kernel(
        short.short_forward, problem.sequences * problem.heads,
        **_common(problem, query, key, value, strength, mask, cu, seed, backward=False),
        **strides("o", out), out_ptr=out, lse_ptr=lse, key_part_ptr=key_part, anchor_ptr=anchor,
    )  # fmt: skip
    return out, lse, key_part, anchor


def run_short_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
    lse: Tensor, key_part: Tensor, anchor: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma row by row."""
    dq, dk, dv = (empty_states(problem, query) for _ in range(3))
    dgamma = torch.empty(problem.rows_shape, dtype=torch.float32, device=query.device)
    start_kernel(
        short.short_backward, problem.sequences * problem.heads,
        **_common(problem, query, key, value, strength, mask, cu, seed, backward=True),
        **strides("g", grad), **strides("d", dq), scale=problem.scale,
        grad_ptr=grad, lse_ptr=lse, key_part_ptr=key_part, anchor_ptr=anchor,
        dq_ptr=dq, dk_ptr=dk, dv_ptr=dv, strength_grad_ptr=dgamma,
    )  # fmt: skip
    return dq, dk, dv, dgamma


def saved_vectors(problem: Problem, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty lse, key_part (what keys hear, or its exponential) and anchor; unused ones have no entry."""
    rows = problem.rows_shape
    shapes = (rows, rows if problem.hears else (0,), rows if problem.may_underflow else (0,))
    lse, key_part, anchor = (torch.empty(shape, dtype=torch.float32, device=like.device) for shape in shapes)
    return lse, key_part, anchor


def _common(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None, *, backward: bool,
) -> dict[str, Any]:  # fmt: skip
    block = short_block(problem, backward)
    return {
        "q_ptr": query, "k_ptr": key, "v_ptr": value, "strength_ptr": strength,
        "mask_ptr": given(mask, strength), "cu_ptr": given(cu, strength), "seed_ptr": given(seed, strength),
        **strides("q", query), **strides("k", key), **strides("v", value),
        **problem.numbers, **problem.constants, **problem.drop_numbers, **problem.message_numbers,
        "KEYS": block.keys, "TAIL": problem.packed or problem.length != block.keys,
        "HEARS": problem.hears, "CAREFUL": problem.may_underflow, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
        **resources(block),
    }  # fmt: skip

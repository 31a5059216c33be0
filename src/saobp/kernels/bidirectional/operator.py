"""The fused operation on long sequences as registered operators, and what the other operators share with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saobp.kernels.bidirectional.launch import run_backward, run_forward, saved_pieces
from saobp.kernels.call_spec import Problem, empty_states
from saobp.kernels.runtime.custom_op import differentiable, registered
from saobp.refinement import MAX_STRENGTH


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return empty_states(problem, query), query.new_empty(saved_pieces(problem)[1], dtype=torch.uint8)


@registered("refined_attention", _fake_forward)
def refined_attention(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return run_forward(problem, query, key, value, strength, mask, cu, seed)


def fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None,
    cu: Tensor | None, seed: Tensor | None, out: Tensor, saved: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    dq, dk, dv = (empty_states(problem, query) for _ in range(3))
    return dq, dk, dv, query.new_empty(problem.rows_shape, dtype=torch.float32)


@registered("refined_attention_backward", fake_backward)
def refined_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, out: Tensor, saved: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return run_backward(problem, grad, query, key, value, strength, mask, cu, seed, out, saved)


def saved_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Tensors in and out; the first seven inputs are tensors, the rest numbers."""
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.numbers = inputs[7:]


def gradients(operator: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the thirteen inputs, by a backward operator that gives dq, dk, dv and gamma's row by row."""
    query, key, value, strength, mask, cu, seed, *saved = ctx.saved_tensors
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    dq, dk, dv, parts = operator(grad, query, key, value, strength, mask, cu, seed, *saved, *ctx.numbers)
    if key.shape[1] != query.shape[1]:
        dk, dv = (d.unflatten(1, (key.shape[1], -1)).sum(2) for d in (dk, dv))
    d_strength = None
    if ctx.needs_input_grad[3]:
        sign, _, bound = ctx.numbers[3:]
        if bound:
            raise RuntimeError(f"a strength that learns needs bound 0, which is unknown, not {bound}")
        inside = strength.abs() <= MAX_STRENGTH
        slope = torch.where(inside, sign * torch.exp(-sign * strength.float()), 0.0)
        d_strength = (parts.sum((0, 2)) * slope).to(strength.dtype)
    return dq, dk, dv, d_strength, *[None] * 9


differentiable(refined_attention, partial(gradients, refined_attention_backward), saved_for_backward)

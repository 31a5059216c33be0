"""Strict causal attention as registered operators."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from saobp.kernels.causal_launch import run_causal_backward, run_causal_forward, saved_shapes
from saobp.kernels.operator import gradients, saved_for_backward
from saobp.kernels.problem import Problem, empty_states
from saobp.kernels.registered import differentiable, registered


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    saved = (query.new_empty(shape, dtype=torch.float32) for shape in saved_shapes(problem))
    lse, heard, belief, lowest = saved
    return empty_states(problem, query), lse, heard, belief, lowest


@registered("causal_refined_attention", _fake_forward)
def causal_refined_attention(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return run_causal_forward(problem, query, key, value, strength, mask, cu, seed)


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None,
    cu: Tensor | None, seed: Tensor | None, out: Tensor, lse: Tensor, heard: Tensor, belief: Tensor, lowest: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    dq, dk, dv = (empty_states(problem, query) for _ in range(3))
    return dq, dk, dv, query.new_empty(query.shape[:3], dtype=torch.float32)


@registered("causal_refined_attention_backward", _fake_backward)
def causal_refined_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, out: Tensor, lse: Tensor, heard: Tensor, belief: Tensor, lowest: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return run_causal_backward(
        problem, grad, query, key, value, strength, mask, cu, seed, out, lse, heard, belief, lowest
    )


differentiable(
    causal_refined_attention, partial(gradients, causal_refined_attention_backward), saved_for_backward
)

"""Strict causal attention as registered operators."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from saobp.kernels.bidirectional.operator import fake_backward, gradients, saved_for_backward
from saobp.kernels.call_spec import Problem, empty_states
from saobp.kernels.causal.launch import run_causal_backward, run_causal_forward, saved_pieces
from saobp.kernels.runtime.custom_op import differentiable, registered


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return empty_states(problem, query), query.new_empty(saved_pieces(problem)[1], dtype=torch.uint8)


@registered("causal_refined_attention", _fake_forward)
def causal_refined_attention(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return run_causal_forward(problem, query, key, value, strength, mask, cu, seed)


@registered("causal_refined_attention_backward", fake_backward)
def causal_refined_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, out: Tensor, saved: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return run_causal_backward(problem, grad, query, key, value, strength, mask, cu, seed, out, saved)


differentiable(
    causal_refined_attention, partial(gradients, causal_refined_attention_backward), saved_for_backward
)

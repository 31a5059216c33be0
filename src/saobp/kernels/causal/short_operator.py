"""Strict causal attention on short sequences as registered operators."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from saobp.kernels.bidirectional.operator import gradients
from saobp.kernels.bidirectional.short_operator import saved_but_output
from saobp.kernels.call_spec import Problem, empty_states
from saobp.kernels.causal.short_launch import (
    past_shape,
    run_short_causal_backward,
    run_short_causal_forward,
)
from saobp.kernels.runtime.custom_op import differentiable, registered


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return empty_states(problem, query), query.new_empty(past_shape(problem), dtype=torch.float32)


@registered("short_causal_refined_attention", _fake_forward)
def short_causal_refined_attention(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return run_short_causal_forward(
        query, key, value, strength, mask, cu, seed, longest, scale, dropout, sign, hears, bound
    )


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, past: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    dq, dk, dv = (empty_states(problem, query) for _ in range(3))
    return dq, dk, dv, query.new_empty(problem.rows_shape, dtype=torch.float32)


@registered("short_causal_refined_attention_backward", _fake_backward)
def short_causal_refined_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, past: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return run_short_causal_backward(
        grad, query, key, value, strength, mask, cu, seed, past, longest, scale, dropout, sign, hears, bound
    )


differentiable(
    short_causal_refined_attention,
    partial(gradients, short_causal_refined_attention_backward),
    saved_but_output,
)

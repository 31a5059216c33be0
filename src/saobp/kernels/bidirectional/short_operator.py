"""Attention on short sequences as registered operators."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from saobp.kernels.bidirectional.operator import gradients
from saobp.kernels.bidirectional.short_launch import run_short_backward, run_short_forward, saved_shapes
from saobp.kernels.call_spec import Problem, empty_states
from saobp.kernels.runtime.custom_op import differentiable, learns, registered


def _fake_output(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> Tensor:  # fmt: skip
    return empty_states(Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound), query)


@registered("short_refined_output", _fake_output)
def short_refined_output(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> Tensor:  # fmt: skip
    """For inference: what only the backward pass needs is neither allocated nor stored."""
    if learns(query, key, value, strength):
        raise RuntimeError("short_refined_output has no gradient: use short_refined_attention, or no_grad")
    return run_short_forward(
        query, key, value, strength, mask, cu, seed, longest, scale, dropout, sign, hears, bound, saves=False
    )[0]


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    lse, key_part, anchor = (query.new_empty(shape, dtype=torch.float32) for shape in saved_shapes(problem))
    return empty_states(problem, query), lse, key_part, anchor


@registered("short_refined_attention", _fake_forward)
def short_refined_attention(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return run_short_forward(  # type: ignore[return-value]
        query, key, value, strength, mask, cu, seed, longest, scale, dropout, sign, hears, bound, saves=True
    )


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None,
    cu: Tensor | None, seed: Tensor | None, lse: Tensor, key_part: Tensor, anchor: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    dq, dk, dv = (empty_states(problem, query) for _ in range(3))
    return dq, dk, dv, query.new_empty(problem.rows_shape, dtype=torch.float32)


@registered("short_refined_attention_backward", _fake_backward)
def short_refined_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, lse: Tensor, key_part: Tensor, anchor: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return run_short_backward(
        grad, query, key, value, strength, mask, cu, seed, lse, key_part, anchor,
        longest, scale, dropout, sign, hears, bound,
    )  # fmt: skip


def saved_but_output(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """All but the output: the backward pass has the whole map and needs no product with it."""
    ctx.save_for_backward(*inputs[:7], *output[1:])
    ctx.numbers = inputs[7:]


differentiable(
    short_refined_attention, partial(gradients, short_refined_attention_backward), saved_but_output
)

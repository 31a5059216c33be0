"""ElemMul as registered operators of its own: it has neither strengths nor dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels.call_spec import empty_states
from saobp.kernels.elemmul.launch import elemmul_problem, run_elemmul, run_elemmul_backward, saved_pieces
from saobp.kernels.runtime.custom_op import differentiable, registered


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cu: Tensor | None, longest: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = elemmul_problem(query, key, mask, cu, longest, scale)
    return empty_states(problem, query), query.new_empty(saved_pieces(problem)[1], dtype=torch.uint8)


@registered("elemmul_attention", _fake_forward)
def elemmul_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cu: Tensor | None, longest: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = elemmul_problem(query, key, mask, cu, longest, scale)
    return run_elemmul(problem, query, key, value, mask, cu)


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cu: Tensor | None,
    out: Tensor, saved: Tensor, longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    problem = elemmul_problem(query, key, mask, cu, longest, scale)
    dq, dk, dv = (empty_states(problem, query) for _ in range(3))
    return dq, dk, dv


@registered("elemmul_attention_backward", _fake_backward)
def elemmul_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cu: Tensor | None,
    out: Tensor, saved: Tensor, longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    problem = elemmul_problem(query, key, mask, cu, longest, scale)
    return run_elemmul_backward(problem, grad, query, key, value, mask, cu, out, saved)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.numbers = inputs[5:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, mask, cu, *saved = ctx.saved_tensors
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    dq, dk, dv = elemmul_attention_backward(grad, query, key, value, mask, cu, *saved, *ctx.numbers)
    if key.shape[1] != query.shape[1]:
        dk, dv = (d.unflatten(1, (key.shape[1], -1)).sum(2) for d in (dk, dv))
    return dq, dk, dv, None, None, None, None


differentiable(elemmul_attention, _backward, _setup_context)

"""Strict causal ElemMul as an operator that autograd and ``torch.compile`` understand; it needs no Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels.elemmul.causal import causal_elemmul, causal_elemmul_gradients, state_shape
from saobp.kernels.runtime.custom_op import operator, register_autograd

INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask"


def causal_elemmul_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Output ``[batch, heads, length, dim]``; arguments as in :func:`saobp.attention`, already checked.

    mask: bool ``[batch, length]``, True for real tokens
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = FORWARD(query, key, value, mask, scale)[0]
    return output


def _fake_forward(
    query: Tensor, _key: Tensor, value: Tensor, _mask: Tensor | None, _scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    arithmetic = torch.promote_types(query.dtype, torch.float32)
    return output, query.new_empty(state_shape(query, value), dtype=arithmetic)


def _fake_backward(_grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    return tuple(states.new_empty(states.shape) for states in saved[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    return *BACKWARD(grad, *saved, ctx.scale), None, None


FORWARD = operator(
    "causal_elemmul", f"({INPUTS}, float scale) -> (Tensor, Tensor)", causal_elemmul, _fake_forward
)
BACKWARD = operator(
    "causal_elemmul_backward",
    f"(Tensor grad, {INPUTS}, Tensor sums, float scale) -> (Tensor, Tensor, Tensor)",
    causal_elemmul_gradients,
    _fake_backward,
)
register_autograd(FORWARD, _gradients, _save)

"""The fused operation as registered operators that autograd, ``torch.compile`` and CUDA graphs understand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.library import Library, infer_schema, register_fake

from saobp.kernels.launch import lowest_blocks, run_backward, run_forward
from saobp.kernels.problem import Problem, empty_states
from saobp.refinement import MAX_STRENGTH

_library = Library("saobp", "FRAGMENT")


def registered(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], OpOverload]:
    """An operator of fresh tensors that the compiler keeps whole and knows by the shapes that ``fake`` gives.

    Not by ``torch.library.custom_op``, whose checks of every call take 20 microseconds.
    """

    def register(function: Callable[..., Any]) -> OpOverload:
        _library.define(name + infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
        register_fake(f"saobp::{name}", fake, lib=_library)
        operator: OpOverload = getattr(torch.ops.saobp, name).default
        return operator

    return register


def learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def differentiable(
    operator: OpOverload,
    backward: Callable[..., tuple[Tensor | None, ...]],
    save: Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], None],
) -> None:
    """Gives the first of an operator's outputs gradients; the others are what the backward pass needs.

    Not by ``torch.library.register_autograd``, which reads the schema anew in every call, for 50 microseconds.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs_and_keys: Any) -> tuple[Tensor, ...]:
            *inputs, keys = inputs_and_keys
            output = below(keys, *inputs)
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)  # zeros for the others would be launches
            save(ctx, tuple(inputs), output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
            if grad is None:
                return (None,) * len(ctx.needs_input_grad)
            return *backward(ctx, grad), None

    def below(keys: Any, *inputs: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            output: tuple[Tensor, ...] = operator.redispatch(keys & torch._C._after_autograd_keyset, *inputs)
        return output

    def autograd(keys: Any, *inputs: Any) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            output: tuple[Tensor, ...] = Differentiable.apply(*inputs, keys)
            return output
        return below(keys, *inputs)

    Differentiable.__name__ = Differentiable.__qualname__ = f"{operator._opname}_with_gradients"
    _library.impl(operator._opname, autograd, "Autograd", with_keyset=True)


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    out = empty_states(problem, query)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    rows = (problem.batch, problem.heads, problem.length)
    heard, weight = (torch.empty(rows if hears else 0, **floats) for _ in range(2))
    lowest = torch.empty(problem.sequences * problem.heads * lowest_blocks(problem), **floats)
    return (
        out,
        torch.empty(problem.lse_shape, **floats),
        heard,
        weight,
        torch.empty(rows, **floats),
        torch.empty(rows, **floats),
        lowest,
    )


@registered("refined_attention", _fake_forward)
def refined_attention(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return run_forward(problem, query, key, value, strength, mask, cu, seed)


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None,
    cu: Tensor | None, seed: Tensor | None, out: Tensor, lse: Tensor, heard: Tensor, weight: Tensor, anchor: Tensor, inverse: Tensor,
    lowest: Tensor, longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    dq, dk, dv = (empty_states(problem, query) for _ in range(3))
    return dq, dk, dv, query.new_empty(query.shape[:3], dtype=torch.float32)


@registered("refined_attention_backward", _fake_backward)
def refined_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mask: Tensor | None, cu: Tensor | None,
    seed: Tensor | None, out: Tensor, lse: Tensor, heard: Tensor, weight: Tensor, anchor: Tensor, inverse: Tensor, lowest: Tensor,
    longest: int, scale: float, dropout: float, sign: float, hears: bool, bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(query, key, mask, cu, longest, scale, dropout, sign, hears, bound)
    return run_backward(
        problem,
        grad,
        query,
        key,
        value,
        strength,
        mask,
        cu,
        seed,
        out,
        lse,
        heard,
        weight,
        anchor,
        inverse,
        lowest,
    )


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

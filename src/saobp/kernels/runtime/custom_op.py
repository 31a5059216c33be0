"""PyTorch operators that autograd, ``torch.compile`` and CUDA graphs understand, with little overhead per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.library import Library, register_fake

NAMESPACE = "saobp"
"""Namespace of the operators; the kernel for the hub has another, so that both can be loaded."""

_library = Library(NAMESPACE, "FRAGMENT")


def operator(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    """A functional operator, opaque to the compiler, with ``fake`` for its output shapes.

    Not by ``torch.library.custom_op``, whose checks cost 20 microseconds per call.
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
    register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    made: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return made


def requires_grad(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> bool:
    learned = query.requires_grad or key.requires_grad or value.requires_grad or strength.requires_grad
    return learned and torch.is_grad_enabled()


def reject_forward_mode(*tensors: Tensor) -> None:
    """Raises on forward-mode derivatives, which PyTorch would silently treat as zero."""
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise RuntimeError(
            "the fused kernels have no forward-mode derivatives: use backend='reference' for those"
        )


class OnceDifferentiable(torch.autograd.Function):
    """Identity on gradients, connected to the tensors they depend on. Raises on double backward."""

    @staticmethod
    def forward(_ctx: Any, count: int, *gradients_and_sources: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients_and_sources[:count]

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "this path of attention has no second derivatives: use backend='reference' for those"
        )


def register_autograd(
    operator: OpOverload,
    backward: Callable[..., tuple[Tensor | None, ...]],
    save: Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], None],
) -> None:
    """Registers autograd for the first output of an operator; the others are saved for the backward pass.

    ``backward`` gets the context, what was saved, and the gradient. Saved tensors are read once: checkpoints allow no second time.

    Not by ``torch.library.register_autograd``, which parses the schema in every call, for 50 microseconds.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs_and_keys: Any) -> tuple[Tensor, ...]:
            *inputs, keys = inputs_and_keys
            output = below_autograd(keys, *inputs)
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)  # zeros for the others would cost launches
            save(ctx, tuple(inputs), output)
            return output

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
            if grad is None:
                return (None,) * len(ctx.needs_input_grad)
            saved = ctx.saved_tensors
            if not torch.is_grad_enabled():
                return *backward(ctx, saved, grad), None
            with torch.no_grad():
                gradients = backward(ctx, saved, grad)
            return *OnceDifferentiable.apply(len(gradients), *gradients, grad, *saved), None

    def below_autograd(keys: Any, *inputs: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            output: tuple[Tensor, ...] = operator.redispatch(keys & torch._C._after_autograd_keyset, *inputs)
        return output

    def autograd(keys: Any, *inputs: Any) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            output: tuple[Tensor, ...] = Differentiable.apply(*inputs, keys)
            return output
        return below_autograd(keys, *inputs)

    Differentiable.__name__ = Differentiable.__qualname__ = f"{operator._opname}_with_gradients"
    _library.impl(operator._opname, autograd, "Autograd", with_keyset=True)

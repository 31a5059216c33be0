"""Queries, keys and values of a layer as one matrix product, while a model is trained.

Three products of one input, the casts of their weights and their gradients are many small kernels, and a GPU
idles between kernels. The weights stay three parameters with their names and gradients; only the
computation of a step is fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from saobp.training.temporary_class import temporary_class

ROLES = ("query", "key", "value")


@contextmanager
def fused_projections(model: nn.Module) -> Iterator[None]:
    """Context in which ``query``, ``key`` and ``value`` layers of an attention share one matrix product."""
    with ExitStack() as stack:
        for layers in [found for module in model.modules() if (found := fusable(module))]:
            product = FusedProduct(layers)
            for index, layer in enumerate(layers):
                stack.enter_context(temporary_class(layer, FusedProjection, product=product, index=index))
        yield


def fusable(module: nn.Module) -> tuple[nn.Linear, ...]:
    """The three layers of an attention, if they can be fused (plain, one width, same biases); else empty."""
    layers = [getattr(module, role, None) for role in ROLES]
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    kinds = {(one.in_features, one.bias is None, one.weight.dtype, one.weight.device) for one in plain}
    return tuple(plain) if len(plain) == len(ROLES) and len(kinds) == 1 else ()


def is_fused(module: nn.Module) -> bool:
    """Whether a layer is currently part of a fused product, which casts the weights itself."""
    return isinstance(module, FusedProjection)


class FusedProduct:
    """Product of an input with the weights of several layers, cached until the last layer has read it."""

    def __init__(self, layers: tuple[nn.Linear, ...]) -> None:
        self.layers = layers
        self.states: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def part(self, index: int, states: Tensor) -> Tensor:
        """The output of one layer for states ``[..., width]``; the first layer computes it for all."""
        if index == 0:
            self.states, self.parts = states, multiply(states, self.layers)
        elif self.states is not states:
            return multiply(states, self.layers[index : index + 1])[0]
        part = self.parts[index]
        if index == len(self.layers) - 1:
            self.states, self.parts = None, ()
        return part


class FusedProjection:
    """One layer of a fused product; mixed into ``nn.Linear`` by :func:`temporary_class`."""

    product: FusedProduct
    index: int

    def forward(self, states: Tensor) -> Tensor:
        return self.product.part(self.index, states)


def multiply(states: Tensor, layers: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
    """Each layer's output for ``[..., width]``, by one product with weights cast to the states' dtype.

    Cast after concatenation, so that their gradients too are converted to float32 at once.
    """
    weight = torch.cat(tuple(layer.weight for layer in layers)).to(states.dtype)
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat(biases).to(states.dtype) if biases else None
    return functional.linear(states, weight, bias).split([layer.out_features for layer in layers], -1)

"""Queries, keys and values of a layer as one matrix product, while a model is trained.

Three products of one input, the roundings of their weights and their gradients are many small kernels on a
GPU, and between any two kernels it rests. The weights stay three parameters with their names and gradients;
only the computation of a step is joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

ROLES = ("query", "key", "value")


@contextmanager
def joined_projections(model: nn.Module) -> Iterator[None]:
    """Meanwhile every attention that has plain ``query``, ``key`` and ``value`` layers multiplies once."""
    triples = [layers for module in model.modules() if (layers := joinable(module))]
    for layers in triples:
        product = JointProduct(layers)
        for place, layer in enumerate(layers):
            layer.forward = PartOfProduct(product, place)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layers in triples:
            for layer in layers:
                del layer.forward


def joinable(module: nn.Module) -> tuple[nn.Linear, ...]:
    """The three layers of an attention, if they are plain, of one width and alike in biases; else none."""
    layers = [getattr(module, role, None) for role in ROLES]
    plain = [layer for layer in layers if type(layer) is nn.Linear and "forward" not in vars(layer)]
    looks = {(one.in_features, one.bias is None, one.weight.dtype, one.weight.device) for one in plain}
    return tuple(plain) if len(plain) == len(ROLES) and len(looks) == 1 else ()


def is_joined(module: nn.Module) -> bool:
    """Whether a layer is at present a part of a joint product, which rounds the weights itself."""
    return isinstance(module.forward, PartOfProduct)


class JointProduct:
    """The product of an input with the weights of several layers, kept until the last of them has asked."""

    def __init__(self, layers: tuple[nn.Linear, ...]) -> None:
        self.layers = layers
        self.states: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def part(self, place: int, states: Tensor) -> Tensor:
        """What one layer makes of states ``[..., width]``; the first layer computes it for all."""
        if place == 0:
            self.states, self.parts = states, multiply(states, self.layers)
        elif self.states is not states:
            return multiply(states, self.layers[place : place + 1])[0]
        part = self.parts[place]
        if place == len(self.layers) - 1:
            self.states, self.parts = None, ()
        return part


class PartOfProduct:
    """The forward of one layer of a joint product."""

    def __init__(self, product: JointProduct, place: int) -> None:
        self.product, self.place = product, place

    def __call__(self, states: Tensor) -> Tensor:
        return self.product.part(self.place, states)


def multiply(states: Tensor, layers: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
    """Each layer's output for ``[..., width]``, by one product with weights rounded to the states' type.

    Rounded after they are joined, so that their gradients too are made float32 at once.
    """
    weight = torch.cat(tuple(layer.weight for layer in layers)).to(states.dtype)
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat(biases).to(states.dtype) if biases else None
    return functional.linear(states, weight, bias).split([layer.out_features for layer in layers], -1)

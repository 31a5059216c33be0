"""Layers that are computed in fewer or faster products while a model is trained; its parameters stay.

Queries, keys and values of an attention are one matrix product: three products of one input, the casts of
their weights and their gradients are many small kernels, and a GPU idles between kernels. The output layer
computes logits for a multiple of 64 tokens. Full rows get no attention mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)


@contextmanager
def temporary_class(module: nn.Module, mixin: type, **attributes: Any) -> Iterator[None]:
    """Context in which the module's class derives from ``mixin`` and its own, with the attributes set.

    A wrapper around a module would rename its parameters, and a hook cannot take the place of a forward.
    Afterwards it has its class again, unless FSDP has made one of its own from it; so a mixin without its
    attributes must behave like the module's own class.
    """
    original = type(module)
    derived = type(original.__name__, (mixin, original), {"__module__": original.__module__})
    module.__class__ = derived
    vars(module).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(module)[name]
        if type(module) is derived:
            module.__class__ = original


ROLES = ("query", "key", "value")


@contextmanager
def fused_projections(model: nn.Module) -> Iterator[None]:
    """Context in which ``query``, ``key`` and ``value`` layers of an attention share one matrix product."""
    with ExitStack() as stack:
        for layers in [fused for module in model.modules() if (fused := fusable(module))]:
            product = FusedProduct(layers)
            for index, layer in enumerate(layers):
                stack.enter_context(temporary_class(layer, FusedProjection, product=product, index=index))
        yield


def fusable(module: nn.Module) -> tuple[nn.Linear, ...]:
    """The three layers of an attention, if they can be fused (plain, one width, same biases); else empty."""
    layers = [getattr(module, role, None) for role in ROLES]
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    kinds = {
        (linear.in_features, linear.bias is None, linear.weight.dtype, linear.weight.device)
        for linear in plain
    }
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


MULTIPLE = 64
"""Logits are computed for a multiple of so many tokens."""


@contextmanager
def fast_output_layer(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model's output layer, if it is a plain one, is an :class:`OutputLayer`."""
    layer = model.get_output_embeddings()
    if type(layer) is nn.Linear:
        with temporary_class(layer, OutputLayer):
            yield
    else:
        yield


class OutputLayer:
    """Mixed into ``nn.Linear`` by :func:`temporary_class`."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, states: Tensor) -> Tensor:
        """Logits ``[..., vocabulary]``; where it has a bias, further ones of minus infinity."""
        return Product.apply(states, *padded(self.weight, self.bias))


def padded(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias with further outputs that have no probability.

    BERT's 30522 tokens are no multiple of 8, and products of such a width are slow: for the 608 predicted
    tokens of 32 rows 84, 46 and 33 microseconds on an H200, padded 24, 19 and 19. Loss and gradients stay. A
    layer without bias stays as it is.
    """
    missing = -weight.shape[0] % MULTIPLE
    if bias is None or not missing:
        return weight, bias
    return functional.pad(weight, (0, 0, 0, missing)), functional.pad(bias, (0, missing), value=-torch.inf)


class Product(torch.autograd.Function):
    """``functional.linear`` whose weight gradient is contiguous.

    PyTorch's is the transpose of one, which has to be copied before a parameter keeps it: 31 microseconds.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return functional.linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        states, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight, rows.t() @ states.flatten(0, -2), of_bias


SDPA = "sdpa"


@contextmanager
def no_masks_for_full_rows() -> Iterator[None]:
    """Context in which models with SDPA build no mask for rows without padding, compiled or not.

    SDPA chooses its fast kernels only without a mask. Transformers leaves out a mask that hides nothing, but
    up to 5.17 not while a model is being compiled.
    """
    build: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS[SDPA]

    def mask(**options: Any) -> Tensor | None:
        return None if hides_nothing(**options) else build(**options)

    ALL_MASK_ATTENTION_FUNCTIONS[SDPA] = mask
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[SDPA]  # the override
        if ALL_MASK_ATTENTION_FUNCTIONS[SDPA] is not build:
            ALL_MASK_ATTENTION_FUNCTIONS[SDPA] = build


def hides_nothing(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """Whether a mask, built from these arguments of Transformers, says no more than SDPA's ``is_causal``."""
    starts = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    causal = mask_function is causal_mask_function and allow_is_causal_skip
    both_ways = mask_function is bidirectional_mask_function and allow_is_bidirectional_skip
    return attention_mask is None and starts and (causal or both_ways)

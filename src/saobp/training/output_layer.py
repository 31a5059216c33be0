"""The layer that gives logits, in products that GPUs are fast at, while a model is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from saobp.training.temporary_class import temporary_class

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

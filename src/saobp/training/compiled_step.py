"""The forward of a training step: tokens in, loss out, as one compiled function."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from saobp.training.fast_gradients import FastZeroGrad
from saobp.training.fast_layers import (
    fast_output_layer,
    fused_projections,
    no_masks_for_full_rows,
    temporary_class,
)
from saobp.training.objectives import Objective

REGULARIZER = "saobp_regularizer"
COMPILER_SETTINGS: dict[str, Any] = {
    "triton.mix_order_reduction": False,
    "combo_kernels": True,
    "combo_kernels_pointwise_only": True,
}
"""Inductor settings for a step on a GPU; ones that this PyTorch lacks are skipped.

They reduce the number of kernels, between which a GPU idles: ``combo_kernels`` merges independent kernels,
``triton.mix_order_reduction`` off avoids separate reductions. Together: 231 instead of 305 kernels a step of
BERT-mini, 3.3 % instead of 4.3 % idle, on an H200.
"""


class LossModel(FastZeroGrad):
    """Mixed into a model's class by :func:`temporary_class`: forward is the loss; a cheap zero_grad."""

    loss: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self.loss is None:
            return super().forward(*inputs, **options)  # type: ignore[misc]
        return self.loss(*inputs, **options)


@contextmanager
def loss_as_forward(
    model: PreTrainedModel,
    objective: Objective,
    *,
    precision: str = "fp32",
    compiled: bool = False,
    regularizer: Any = None,
    sharded: bool = False,
) -> Iterator[PreTrainedModel]:
    """Context in which ``model(input_ids=..., seeds=...)`` is the loss of the objective.

    Trainer then wraps, shards, saves and restores the model itself, and the loss, including masking and the
    head at masked positions, is one graph inside the wrapper. A regularizer's penalty is added in training
    only, so held-out losses stay comparable. Evaluations are not compiled: they are rare, and compiling takes
    longer. Sharded weights are gathered layer by layer, so nothing is compiled or cast up front: bfloat16 is
    then autocast. A regularizer's parameters belong to the model: optimised, synchronised, in checkpoints.
    Queries, keys and values are one product, unless weights are sharded or activations are checkpointed,
    where memory matters more.
    """
    autocast = sharded and precision == "bf16"
    device_type = next(model.parameters()).device.type
    inner = "fp32" if autocast else precision

    def loss(ids: Tensor, seeds: Tensor, counts: Tensor | None) -> Tensor:
        return objective(model, ids, seeds, inner, counts)

    def penalised(ids: Tensor, seeds: Tensor, counts: Tensor | None) -> Tensor:
        return loss(ids, seeds, counts) + regularizer.penalty()

    step: Callable[[Tensor, Tensor, Tensor | None], Tensor] = loss
    if regularizer is not None:
        regularizer.attach(model)
        model.add_module(REGULARIZER, regularizer)
        step = penalised
    if compiled and not (sharded or (regularizer is not None and model.is_gradient_checkpointing)):
        options = gpu_options() if device_type == "cuda" else None
        step = torch.compile(with_own_code(step), dynamic=False, options=options)

    def forward(input_ids: Tensor, seeds: Tensor, counts: Tensor | None = None) -> Tensor:
        with torch.autocast(device_type, torch.bfloat16, enabled=autocast):
            if regularizer is not None and model.training and torch.is_grad_enabled():
                with regularizer.watch(model):
                    return step(input_ids, seeds, counts)
            if regularizer is not None or (compiled and not torch.is_grad_enabled()):
                return loss(input_ids, seeds, counts)
            return step(input_ids, seeds, counts)

    with ExitStack() as stack:
        stack.enter_context(no_masks_for_full_rows())
        if not (sharded or model.is_gradient_checkpointing):
            stack.enter_context(fused_projections(model))
            if device_type == "cuda":
                stack.enter_context(fast_output_layer(model))
        if regularizer is not None:
            stack.callback(delattr, model, REGULARIZER)
        trainable = None if sharded else [p for p in model.parameters() if p.requires_grad]
        stack.enter_context(temporary_class(model, LossModel, loss=forward, trainable=trainable))
        yield model


def gpu_options() -> dict[str, Any] | None:
    """Arguments of torch.compile on a GPU."""
    known = torch._inductor.list_options()
    return {name: value for name, value in COMPILER_SETTINGS.items() if name in known} or None


def free_memory() -> None:
    """Free the last model with its compiled code and CUDA graphs, which hold gigabytes.

    Compiled code stays in the disk cache.
    """
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy with a code object of its own.

    Dynamo limits recompilations per code object: without this, it gives up after a few models in one process.
    """
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )

"""Weights, gradients and optimiser state sharded across processes: FSDP 2.

Accelerate shards under ``accelerate launch --use_fsdp --fsdp_version 2``. This sets the wrapping policy: one
unit per layer, and the rest together, since the head shares weights with the token embeddings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


def fsdp_requested(regularizer: str | None = None) -> bool:
    """Whether the launch asks for FSDP. Raises on FSDP 1, and on a regularizer with FSDP."""
    requested = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if requested and regularizer is not None:
        raise ValueError(
            f"the regularizer {regularizer!r} looks at the whole model at once, which FSDP divides: leave "
            "--use_fsdp out"
        )
    if requested and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError(
            "pretraining is divided by FSDP 2, and Accelerate's default is version 1: add --fsdp_version 2 "
            "to accelerate launch"
        )
    return requested


def shard_by_layers(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Make Accelerate shard the model by layers when it prepares it."""
    plugin = accelerator.state.fsdp_plugin
    if plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = layer_classes(model)
    plugin.cpu_ram_efficient_loading = False  # every process makes the same weights from the seed
    prepare = accelerator.prepare

    def prepare_together(*objects: Any, **options: Any) -> Any:
        with _embeddings_unnamed(model):
            return prepare(*objects, **options)

    accelerator.prepare = prepare_together


def layer_classes(model: PreTrainedModel) -> list[str]:
    """Transformers' no-split classes, without those that hold token embeddings."""
    table = model.get_input_embeddings().weight
    indivisible = set(model._no_split_modules or ())
    return sorted(
        {
            type(module).__name__
            for module in model.modules()
            if type(module).__name__ in indivisible and all(p is not table for p in module.parameters())
        }
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """A parameter, gathered if it is sharded; then a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_weights(accelerator: Accelerator, model: PreTrainedModel) -> dict[str, Tensor]:
    """State dict of a sharded model, tied weights once, on rank 0; a collective call."""
    tied = set(model._tied_weights_keys or ())
    return {name: weight for name, weight in accelerator.get_state_dict(model).items() if name not in tied}


@contextmanager
def _embeddings_unnamed(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model reports no embedding modules.

    Accelerate would shard them as a unit of their own, separate from the bias that BERT's head shares.
    """
    names = ("get_input_embeddings", "get_output_embeddings")
    for name in names:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)

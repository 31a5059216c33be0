"""Clip and zero gradients without a walk over a model's modules, which is a tenth of a small model's step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import Trainer


class FastZeroGrad:
    """Mixed into a model's class by ``temporary_class``: zero_grad of known parameters.

    trainable: parameters that have gradients; None where FSDP replaces them
    """

    trainable: Sequence[nn.Parameter] | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.trainable is None or not set_to_none:
            super().zero_grad(set_to_none)  # type: ignore[misc]
            return
        for parameter in self.trainable:
            parameter.grad = None


class FastGradientTrainer(Trainer):
    """Clips the gradients of ``trainable``, if they are known, without Accelerate's loop over all modules."""

    trainable: list[nn.Parameter] | None = None

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if self.trainable is None:
            return super()._clip_grad_norm(model)
        return nn.utils.clip_grad_norm_(self.trainable, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Any:
        if grad_norm is None and self.trainable is not None:
            grad_norm = nn.utils.clip_grad_norm_(self.trainable, math.inf)
        return super()._get_grad_norm(model, grad_norm)

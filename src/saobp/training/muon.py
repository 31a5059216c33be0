"""Muon for hidden matrices and AdamW for all other parameters, as one optimiser."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Weight matrices of a model's layers: not embeddings, heads, norms, biases or added parameters."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return [
        parameter
        for name, parameter in model.base_model.named_parameters()
        if parameter.ndim == 2 and id(parameter) not in tables and ".saobp." not in name
    ]


class BatchedMuon(torch.optim.Muon):
    """``torch.optim.Muon`` with ``match_rms_adamw`` that orthogonalises matrices of one shape together.

    PyTorch's takes one after another, which are hundreds of small kernels.
    """

    def __init__(self, matrices: list[nn.Parameter], rate: float, decay: float) -> None:
        super().__init__(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            trainable = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trainable:
                continue
            gradients = [parameter.grad for parameter in trainable]
            for parameter in trainable:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            momenta = [self.state[parameter]["momentum_buffer"] for parameter in trainable]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            updates = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov's
            torch._foreach_mul_(trainable, 1 - group["lr"] * group["weight_decay"])
            alike: dict[torch.Size, list[int]] = defaultdict(list)
            for number, parameter in enumerate(trainable):
                alike[parameter.shape].append(number)
            for shape, numbers in alike.items():
                together = torch.stack([updates[number] for number in numbers])
                together = orthogonalised(together, group["ns_coefficients"], group["ns_steps"], group["eps"])
                torch._foreach_add_(
                    [trainable[number] for number in numbers],
                    together.to(trainable[numbers[0]].dtype).unbind(),
                    alpha=-group["lr"] * 0.2 * max(shape) ** 0.5,
                )
        return loss


def orthogonalised(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Matrices ``[count, rows, columns]`` with singular values near 1, by Newton-Schulz in bfloat16."""
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    product = (matrices.mT if is_tall else matrices).bfloat16()
    product = product / product.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = product @ product.mT
        product = torch.baddbmm(product, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), product, beta=a)
    return product.mT if is_tall else product


class MuonWithAdamW(torch.optim.Optimizer):
    """Moves matrices from an AdamW optimiser to Muon.

    Updates of Muon are scaled to AdamW's RMS, so that learning rates are comparable. Both share their
    parameter groups with this optimiser, so schedulers reach them.
    """

    def __init__(self, adamw: torch.optim.Optimizer, matrices: list[nn.Parameter], rate: float) -> None:
        moved = {id(matrix) for matrix in matrices}
        for group in adamw.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
        decay = max(group["weight_decay"] for group in adamw.param_groups)
        self.parts = {"adamw": adamw, "muon": BatchedMuon(matrices, rate, decay)}
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self.parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]

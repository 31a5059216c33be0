"""Muon for hidden matrices and AdamW for all other parameters, as one optimiser."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

FUSED = {"Wqkv": 3, "c_attn": 3, "Wi": 2}
"""Layers that hold several matrices in one: queries, keys and values, or input and gate."""


class Parts(NamedTuple):
    """How many matrices of one size a parameter holds, one after the other along a dimension."""

    number: int = 1
    dim: int = 0

    def of(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """These matrices, as views."""
        return matrix.chunk(self.number, self.dim)


def hidden_matrices(model: PreTrainedModel) -> dict[nn.Parameter, Parts]:
    """Weight matrices of a model's layers: not embeddings, heads, norms, biases or added parameters."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return {
        parameter: Parts(FUSED.get(path.rpartition(".")[2], 1), int(isinstance(layer, Conv1D)))
        for path, layer in model.base_model.named_modules()
        for parameter in layer.parameters(recurse=False)
        if parameter.ndim == 2 and id(parameter) not in tables and ".saobp" not in path
    }


class BatchedMuon(torch.optim.Muon):
    """``torch.optim.Muon`` with ``match_rms_adamw``, for many small matrices and for fused ones.

    PyTorch's takes one matrix after another, which are hundreds of small kernels: here matrices of one size
    are orthogonalised together. It also takes a fused matrix as one, and Muon works better on queries, keys
    and values apart (https://kellerjordan.github.io/posts/muon/): here each part has an update of its own.
    """

    def __init__(self, matrices: Mapping[nn.Parameter, Parts], rate: float, decay: float) -> None:
        super().__init__(list(matrices), lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        self.parts = dict(matrices)

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
            alike: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter, update in zip(trainable, updates, strict=True):
                parts = self.parts[parameter]
                for matrix, its_update in zip(parts.of(parameter), parts.of(update), strict=True):
                    alike[matrix.shape].append((matrix, its_update))
            for shape, pairs in alike.items():
                matrices, matrix_updates = zip(*pairs, strict=True)
                together = torch.stack(matrix_updates)
                together = orthogonalised(together, group["ns_coefficients"], group["ns_steps"], group["eps"])
                torch._foreach_add_(
                    matrices,
                    together.to(matrices[0].dtype).unbind(),
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

    def __init__(
        self, adamw: torch.optim.Optimizer, matrices: Mapping[nn.Parameter, Parts], rate: float
    ) -> None:
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

"""Muon for hidden matrices and AdamW for all other parameters, as one optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Weight matrices of a model's layers: not embeddings, heads, norms, biases or added parameters."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return [
        parameter
        for name, parameter in model.base_model.named_parameters()
        if parameter.ndim == 2 and id(parameter) not in tables and ".saobp." not in name
    ]


class MuonWithAdamW(torch.optim.Optimizer):
    """Moves matrices from an AdamW optimiser to ``torch.optim.Muon``.

    Updates of Muon are scaled to AdamW's RMS, so that learning rates are comparable. Both share their
    parameter groups with this optimiser, so schedulers reach them.
    """

    def __init__(self, adamw: torch.optim.Optimizer, matrices: list[nn.Parameter], rate: float) -> None:
        taken = {id(matrix) for matrix in matrices}
        for group in adamw.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in taken]
        decay = max(group["weight_decay"] for group in adamw.param_groups)
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        self.parts = {"adamw": adamw, "muon": muon}
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

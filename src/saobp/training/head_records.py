"""Logged per head: attention statistics and strength, learned or fixed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel

from saobp.metrics.health.head_health import CROSS_LAYER, Health
from saobp.training.sharding import full_tensor
from saobp.transformers.layer_refinement import attached, strength_parameters

STATISTICS = ("gtd", "indirect_entropy", "attention_entropy", "sink_mass")
MEASURED = (*STATISTICS, CROSS_LAYER)


def health_line(step: int, health: Health, strengths: list[list[float]] | None) -> dict[str, Any]:
    """A line of ``health.jsonl``: every statistic as a list of heads for each layer."""
    return {
        "step": step,
        "layers": list(health.layers),
        "statistics": {
            name: [heads.tolist() for heads in health.values(name).values()] for name in STATISTICS
        },
        CROSS_LAYER: list(health.cross_layer_gtd().values()),
        "strengths": strengths,
    }


def strengths_of(model: nn.Module) -> list[list[float]] | None:
    """Strength of each head by layer, None without refinement; a collective call."""
    found = [full_tensor(own().detach()).float().cpu().tolist() for _, own in attached(model)]
    return found or None


def separate_strengths(optimizer: torch.optim.Optimizer, model: PreTrainedModel, rate: float) -> None:
    """Move learned strengths to a new last parameter group: no weight decay, own learning rate."""
    strengths = strength_parameters(model)
    moved = {id(strength) for strength in strengths}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
    if strengths:
        optimizer.add_param_group({"params": strengths, "weight_decay": 0.0, "lr": rate})


def delay_strengths(scheduler: LRScheduler, model: PreTrainedModel, first: int) -> None:
    """A learning rate of 0 for learned strengths in the first steps, then that of the schedule."""
    assert isinstance(scheduler, LambdaLR)
    strengths = {id(strength) for strength in strength_parameters(model)}
    for number, group in enumerate(scheduler.optimizer.param_groups):
        if any(id(parameter) in strengths for parameter in group["params"]):
            scheduler.lr_lambdas[number] = partial(_delayed, scheduler.lr_lambdas[number], first)
            group["lr"] = 0.0
            scheduler._last_lr[number] = 0.0


def _delayed(usual: Callable[[int], float], first: int, step: int) -> float:
    return 0.0 if step < first else usual(step)

"""Learned strengths in an optimiser: a learning rate of their own, and none at first."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from saobp.transformers.layer_refinement import strength_parameters


def separate_strengths(optimizer: torch.optim.Optimizer, model: nn.Module, rate: float = 1e-2) -> None:
    """Move learned strengths to a last parameter group with a learning rate of its own and no weight decay.

    Call it before a scheduler is made: with ``trainer.create_optimizer()``, before ``trainer.train()``.
    Without learned strengths nothing changes.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        found = f"{type(optimizer).__name__} and {type(model).__name__}"
        raise TypeError(f"separate_strengths takes an optimiser and then the model, not {found}")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise ValueError(f"rate must be a learning rate such as 0.01, not {rate!r}")
    strengths = strength_parameters(model)
    moved = {id(strength) for strength in strengths}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
    if strengths:
        optimizer.add_param_group({"params": strengths, "weight_decay": 0.0, "lr": rate})


def delay_strengths(scheduler: LRScheduler, model: nn.Module, first: int) -> None:
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

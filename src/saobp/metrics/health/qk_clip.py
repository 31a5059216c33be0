"""Keep attention logits below a bound while a Trainer trains, as MuonClip does."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from saobp.metrics.fast.monitor import Monitor
from saobp.metrics.health.training_steps import TrainingSteps
from saobp.transformers.apply import attention_modules
from saobp.transformers.head_scaling import HeadParts


class QKClip(TrainerCallback):
    """After each optimiser step, scales the query and key weights of heads whose logits went beyond a bound.

        trainer.add_callback(QKClip(trainer, threshold=100.0))

    A head whose largest logit in the step's forwards was m > threshold has its logits multiplied by
    threshold / m: the square root of that falls to the queries' weights and as much to the keys'. Where
    several heads share their keys, all of it falls to the queries, so that other heads of the group do not
    change. Biases are scaled too; a rotary embedding keeps lengths and does not matter. Every ``every``-th
    step is watched. ``Trainer.log`` gets the largest logit and the number of heads clipped since the last
    log.
    """

    def __init__(self, trainer: Trainer, *, threshold: float = 100.0, every: int = 1) -> None:
        if not threshold > 0:
            raise ValueError(f"threshold must be above 0, not {threshold!r}")
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError(
                "QKClip scales whole weights, which FSDP and DeepSpeed split: use plain data parallelism"
            )
        self.trainer, self.threshold, self.every = trainer, threshold, every
        assert trainer.model is not None
        self.modules = {_plain(name): module for name, module in attention_modules(trainer.model)}
        for module in self.modules.values():
            HeadParts(module)  # raises if they cannot be scaled
        self.monitor = Monitor(trainer.model)
        self.steps = TrainingSteps(trainer, self.monitor.measuring)
        self.steps.only_first = False
        self.clipped, self.largest = 0, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.steps.install()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps.due = self.trainer.state.global_step % self.every == 0

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.steps.due = False
        if self.monitor.health:
            self._clip()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state
        if control.should_log:
            self.trainer.log({"qk_clip/heads": float(self.clipped), "qk_clip/max_logit": self.largest})
            self.clipped, self.largest = 0, 0.0

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.steps.remove()

    def _clip(self) -> None:
        found = self.monitor.health.reduced().max_logits()
        self.monitor.health.reset()
        tops: dict[str, Tensor] = {}
        for layer, top in found.items():  # a module that serves several layers has several entries
            name = re.sub(r" \(\d+\)$", "", layer)
            tops[name] = top if name not in tops else torch.maximum(tops[name], top)
        together = torch.cat(list(tops.values())).tolist()  # one synchronisation for all layers
        finite = [top for top in together if top < float("inf")]
        self.largest = max([self.largest, *finite])
        if not any(top > self.threshold for top in finite):
            return
        for name, top in tops.items():
            beyond = (top > self.threshold) & top.isfinite()
            factors = torch.where(beyond, self.threshold / top, torch.ones_like(top))
            self.clipped += int(beyond.sum())
            parts = HeadParts(self.modules[name])
            if parts.key_heads == parts.heads:
                parts.scale(factors.sqrt(), factors.sqrt())
            else:
                parts.scale(factors, factors.new_ones(parts.key_heads))


def _plain(name: str) -> str:
    return re.sub(r"^(?:_orig_mod\.|module\.)+", "", name)

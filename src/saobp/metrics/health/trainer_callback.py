"""Callbacks of a Transformers Trainer: attention health in its logs, and attention logits below a bound."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from saobp.metrics.fast.fast_statistics import FAST
from saobp.metrics.fast.monitor import Monitor
from saobp.metrics.health.health_log import Alert, HealthLog, Range
from saobp.metrics.health.recorder import Recorder, unwrapped
from saobp.metrics.health.verdicts import is_untrained
from saobp.metrics.sampling import SAMPLED, Sampling
from saobp.refinement import check_count
from saobp.transformers.apply import attention_modules
from saobp.transformers.projections import HeadParts


class MeasuredSteps(TrainerCallback):
    """Enters ``measuring`` around every ``every``-th training step; several callbacks may do so at once.

    only_first: whether of a step's forwards, as with accumulated gradients, the first alone is measured
    """

    only_first = True

    def __init__(
        self, trainer: Trainer, every: int, measuring: Callable[[], AbstractContextManager[None]]
    ) -> None:
        check_count("every", every)
        self.trainer, self.every, self.measuring, self.due = trainer, every, measuring, False
        self._training_step: Callable[..., Any] | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._training_step is None:
            self._training_step = self.trainer.training_step
            self.trainer.training_step = self._step  # type: ignore[method-assign]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.due = self.trainer.state.global_step % self.every == 0

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restore the Trainer's own step, also where other wrappers were put around this one."""
        self.trainer.__dict__.pop("training_step", None)
        self._training_step = None

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._training_step is not None
        if not self.due:
            return self._training_step(*args, **kwargs)
        self.due = not self.only_first
        with self.measuring():
            return self._training_step(*args, **kwargs)


def model_of(trainer: Trainer) -> nn.Module:
    """The model that a Trainer trains; raises on anything but a Trainer that has one."""
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"the callback takes the Trainer that it is added to, not {type(trainer).__name__}; in a loop of "
            "your own, saobp.probe and saobp.watch take the model"
        )
    if trainer.model is None:
        raise ValueError("this Trainer has no model yet: one made by model_init comes when training begins")
    return trainer.model


def log_beside(trainer: Trainer, logs: dict[str, float]) -> None:
    """``Trainer.log`` that leaves the Trainer's own log of this step, with the loss, to come."""
    due = trainer.control.should_log
    trainer.log(logs)
    trainer.control.should_log = due


class HealthCallback(MeasuredSteps):
    """Measures the model's attention every so many steps of a Trainer and logs it where the loss goes.

        trainer.add_callback(HealthCallback(trainer, every=50))
        trainer.add_callback(HealthCallback(trainer, every=10, statistics=metrics.FAST))

    The numbers pass through ``Trainer.log``, so they reach the log history and whatever ``report_to`` names.
    Statistics in ``FAST`` are measured as by :func:`saobp.watch`, others as by :func:`saobp.probe`; one
    callback takes one kind. Of a measured step the first forward counts, with its first ``texts`` texts.
    ``ranges``, ``on_alert`` and ``untrained`` as in :class:`HealthLog`; whether the model is untrained is
    found when training begins, unless given.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        every: int = 50,
        texts: int | None = 16,
        statistics: Collection[str] = SAMPLED,
        method: str = "auto",
        sampling: Sampling | None = None,
        prefix: str = "health",
        untrained: bool | None = None,
        ranges: Mapping[str, Range] | None = None,
        on_alert: Callable[[Alert], object] | None = None,
    ) -> None:
        self.untrained = untrained
        model = model_of(trainer)
        self.recorder: Recorder | Monitor
        if statistics and set(statistics) <= set(FAST):
            self.recorder = Monitor(model, texts)
        else:
            mixed = sorted(set(statistics) & set(FAST) - set(SAMPLED))
            if mixed:
                raise ValueError(
                    f"{', '.join(mixed)} belong to the fast tier and the others do not: add two callbacks, "
                    "one with statistics=saobp.metrics.FAST"
                )
            self.recorder = Recorder(model, statistics, method, texts, sampling=sampling)
        super().__init__(trainer, every, self.recorder.measuring)
        self.health_log = HealthLog(
            lambda logs, _: log_beside(trainer, logs),
            prefix,
            untrained=bool(untrained),
            ranges=ranges,
            on_alert=on_alert,
        )
        self.health_log.check_measured(self.recorder.health.statistics)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.untrained is None:
            assert self.trainer.model is not None
            self.health_log.untrained = is_untrained(self.trainer.model)
        super().on_train_begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.recorder.health:
            self.health_log(self.recorder.health, self.trainer.state.global_step)


class QKClip(MeasuredSteps):
    """After each optimiser step, scales the query and key weights of heads whose logits went beyond a bound.

        trainer.add_callback(QKClip(trainer, threshold=100.0))

    A head whose largest logit in the step's forwards was m > threshold has its logits multiplied by
    threshold / m: the square root of that falls to the queries' weights and as much to the keys'. Where
    several heads share their keys, all of it falls to the queries, so that other heads of the group do not
    change. Biases are scaled too; a rotary embedding keeps lengths and does not matter. Every ``every``-th
    step is watched. ``Trainer.log`` gets the largest logit and the number of heads clipped since the last
    log.
    """

    only_first = False

    def __init__(self, trainer: Trainer, *, threshold: float = 100.0, every: int = 1) -> None:
        if not isinstance(threshold, int | float) or not threshold > 0:
            raise ValueError(f"threshold must be above 0, not {threshold!r}")
        model = model_of(trainer)
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError(
                "QKClip scales whole weights, which FSDP and DeepSpeed split: use plain data parallelism"
            )
        self.threshold = threshold
        self.modules = {unwrapped(name): module for name, module in attention_modules(model)}
        for module in self.modules.values():
            HeadParts(module)  # raises if they cannot be scaled
        self.monitor = Monitor(model)
        super().__init__(trainer, every, self.monitor.measuring)
        self.clipped, self.largest = 0, 0.0

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.due = False
        if self.monitor.health:
            self._clip()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state
        if control.should_log:
            logs = {"qk_clip/heads": float(self.clipped), "qk_clip/max_logit": self.largest}
            log_beside(self.trainer, logs)
            self.clipped, self.largest = 0, 0.0

    def _clip(self) -> None:
        max_logits = self.monitor.health.reduced().max_logits()
        self.monitor.health.reset()
        tops: dict[str, Tensor] = {}
        for layer, top in max_logits.items():  # a module that serves several layers has several entries
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

"""Attention health in the logs of a Transformers Trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from transformers import Trainer, TrainerCallback

from saobp.metrics.fast.fast_statistics import FAST
from saobp.metrics.fast.monitor import Monitor
from saobp.metrics.health.health_log import Alert, HealthLog, Range
from saobp.metrics.health.recorder import Recorder
from saobp.metrics.health.training_steps import TrainingSteps
from saobp.metrics.health.untrained import is_untrained
from saobp.metrics.sampling.estimators import SAMPLED, Sampling


class HealthCallback(TrainerCallback):
    """Measures the model's attention every so many steps of a Trainer and logs it where the loss goes.

        trainer.add_callback(HealthCallback(trainer, every=50))
        trainer.add_callback(HealthCallback(trainer, every=10, statistics=metrics.FAST))

    The numbers pass through ``Trainer.log``, so they reach the log history and whatever ``report_to`` names.
    ``statistics`` of the fast tier alone are measured by one sweep over queries and keys, others by the
    thorough tier. Of a measured step the first forward counts, and of its batch the first ``texts`` texts.
    ``ranges``, ``on_alert`` and ``untrained`` as in :class:`HealthLog`; whether the model is untrained is
    found when training begins, unless said.
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
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self.trainer, self.every, self.untrained = trainer, every, untrained
        assert trainer.model is not None
        self.recorder: Recorder | Monitor
        if statistics and set(statistics) <= set(FAST):
            self.recorder = Monitor(trainer.model, texts)
        else:
            mixed = sorted(set(statistics) & set(FAST) - set(SAMPLED))
            if mixed:
                raise ValueError(
                    f"{', '.join(mixed)} belong to the fast tier and the others do not: add two callbacks, "
                    "one with statistics=saobp.metrics.FAST"
                )
            self.recorder = Recorder(trainer.model, statistics, method, texts, sampling=sampling)
        self.steps = TrainingSteps(trainer, self.recorder.measuring)
        self.health_log = HealthLog(
            lambda logs, _: trainer.log(logs),
            prefix,
            untrained=bool(untrained),
            ranges=ranges,
            on_alert=on_alert,
        )

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.untrained is None:
            assert self.trainer.model is not None
            self.health_log.untrained = is_untrained(self.trainer.model)
        self.steps.install()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps.due = self.trainer.state.global_step % self.every == 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.recorder.health:
            self.health_log(self.recorder.health, self.trainer.state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.steps.remove()

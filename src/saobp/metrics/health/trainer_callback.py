"""Attention health in the logs of a Transformers Trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from transformers import Trainer, TrainerCallback

from saobp.metrics.health.health_log import HealthLog
from saobp.metrics.health.recorder import Recorder
from saobp.metrics.sampling.estimators import SAMPLED, Sampling


class HealthCallback(TrainerCallback):
    """Measures the model's attention every so many steps of a Trainer and logs it where the loss goes.

        trainer.add_callback(HealthCallback(trainer, every=50))

    The numbers pass through ``Trainer.log``, so they reach the log history and whatever ``report_to`` names.
    Of a measured step the first forward counts, and of its batch the first ``texts`` texts. ``untrained`` is
    for a model that starts from random weights, as in :class:`HealthLog`.
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
        untrained: bool = False,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self.trainer, self.every = trainer, every
        assert trainer.model is not None
        self.recorder = Recorder(trainer.model, statistics, method, texts, sampling=sampling)
        self.health_log = HealthLog(lambda logs, _: trainer.log(logs), prefix, untrained=untrained)
        self._due = False
        self._training_step: Callable[..., Any] | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._training_step is None:
            self._training_step = self.trainer.training_step
            self.trainer.training_step = self._step  # type: ignore[method-assign]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._due = self.trainer.state.global_step % self.every == 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.recorder.health:
            self.health_log(self.recorder.health, self.trainer.state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._training_step is not None:
            del self.trainer.__dict__["training_step"]
            self._training_step = None

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._training_step is not None
        if not self._due:
            return self._training_step(*args, **kwargs)
        self._due = False
        with self.recorder.measuring():
            return self._training_step(*args, **kwargs)

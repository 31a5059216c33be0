"""Measures inside the training steps of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from transformers import Trainer


class TrainingSteps:
    """Enters ``measuring`` around a Trainer's training steps while ``due``; several may do so at once."""

    def __init__(self, trainer: Trainer, measuring: Callable[[], AbstractContextManager[None]]) -> None:
        self.trainer, self.measuring, self.due = trainer, measuring, False
        self.only_first = True
        self._training_step: Callable[..., Any] | None = None

    def install(self) -> None:
        if self._training_step is None:
            self._training_step = self.trainer.training_step
            self.trainer.training_step = self._step  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the Trainer's own step, also from under others that stand around it."""
        self.trainer.__dict__.pop("training_step", None)
        self._training_step = None

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._training_step is not None
        if not self.due:
            return self._training_step(*args, **kwargs)
        self.due = not self.only_first
        with self.measuring():
            return self._training_step(*args, **kwargs)

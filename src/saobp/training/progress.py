"""Progress bar of a run, and its warnings as plain sentences."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from saobp.progress import ProgressBars


class TrainingProgress(TrainerCallback):
    """Steps, loss, tokens per second and held-out perplexity, on the main process, until it is closed."""

    def __init__(self) -> None:
        self.bars: ProgressBars | None = None
        self.shown: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero:
            self.bars = ProgressBars().__enter__()
            self.bar = self.bars.add("training")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self.bars is not None:
            steps = f"step {state.global_step:,} of {state.max_steps:,}"
            self.bar(state.global_step, state.max_steps, ", ".join([steps, *self.shown.values()]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if logs is None:
            return
        if "loss" in logs:
            self.shown["loss"] = f"loss {logs['loss']:.3f}"
        if logs.get("tokens_per_second"):
            self.shown["rate"] = f"{logs['tokens_per_second']:,.0f} tokens/s"
        if "eval_perplexity" in logs:
            self.shown["perplexity"] = f"held-out perplexity {logs['eval_perplexity']:.1f}"

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.close()

    def close(self) -> None:
        """Clear the bar and restore the cursor; also needed when training raises."""
        if self.bars is not None:
            self.bars.__exit__(None, None, None)
            self.bars = None


@contextmanager
def plain_sentences(notify: Callable[[str], object]) -> Iterator[None]:
    """Context in which warnings and the package's log messages go to ``notify``, without source location.

    Deprecation warnings are dropped. Handlers that a program has configured stay.
    """
    logger = logging.getLogger("saobp")
    handler = _NotifyHandler(notify)
    show, own = warnings.showwarning, not logger.hasHandlers()

    def show_note(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if not issubclass(category, (FutureWarning, DeprecationWarning, PendingDeprecationWarning)):
            notify(f"Note: {message}")

    warnings.showwarning = show_note
    if own:
        logger.addHandler(handler)
    try:
        yield
    finally:
        warnings.showwarning = show
        logger.removeHandler(handler)


def once(notify: Callable[[str], object]) -> Callable[[str], None]:
    """``notify``, called only the first time for each sentence."""
    seen: set[str] = set()

    def notify_once(sentence: str) -> None:
        if sentence not in seen:
            seen.add(sentence)
            notify(sentence)

    return notify_once


class _NotifyHandler(logging.Handler):
    def __init__(self, notify: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self.notify = notify

    def emit(self, record: logging.LogRecord) -> None:
        self.notify(f"Note: {record.getMessage()}")

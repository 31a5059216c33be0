"""One line that shows how far a run is, and sentences that do not tear it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback


class ProgressBar(TrainerCallback):
    """Steps, loss, tokens per second and the time left, on the main process."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.shown: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit=" steps", dynamic_ncols=True
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if self.bar is None or logs is None:
            return
        if "loss" in logs:
            self.shown["loss"] = f"{logs['loss']:.3f}"
        if logs.get("tokens_per_second"):
            self.shown["tokens/s"] = f"{logs['tokens_per_second']:,.0f}"
        if "eval_perplexity" in logs:
            self.shown["held-out perplexity"] = f"{logs['eval_perplexity']:.1f}"
        self.bar.set_postfix(self.shown, refresh=False)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def above_the_bar(say: Callable[[str], object]) -> Callable[[str], None]:
    """``say`` with the bar out of the way meanwhile."""

    def speak(sentence: str) -> None:
        with tqdm.external_write_mode():
            say(sentence)

    return speak


@contextmanager
def plain_sentences(say: Callable[[str], object]) -> Iterator[None]:
    """Meanwhile warnings and what the package logs go to ``say`` as sentences, without a place in the source.

    Announcements of libraries about their own future are left out. A program that has set up logging of its
    own keeps it.
    """
    logger = logging.getLogger("saobp")
    handler = _Saying(say)
    show, own = warnings.showwarning, not logger.hasHandlers()

    def speak(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if not issubclass(category, (FutureWarning, DeprecationWarning, PendingDeprecationWarning)):
            say(f"Note: {message}")

    warnings.showwarning = speak
    if own:
        logger.addHandler(handler)
    try:
        yield
    finally:
        warnings.showwarning = show
        logger.removeHandler(handler)


class _Saying(logging.Handler):
    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(f"Note: {record.getMessage()}")

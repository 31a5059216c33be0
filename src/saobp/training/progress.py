"""One line that shows how far a run is."""

from __future__ import annotations

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

    def say(self, sentence: str) -> None:
        """Print without tearing the bar."""
        tqdm.write(sentence)

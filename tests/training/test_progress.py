"""Sentences in the middle of a run: they stand above the bar and name no line of the source."""

from __future__ import annotations

import io
import logging
import re
import warnings
from pathlib import Path

import pytest

from saobp.testing.tiny_training import small_recipe, train_small
from saobp.training.progress import TrainingProgress, plain_sentences
from saobp.training.trainer import PretrainTrainer


class State:
    is_world_process_zero, max_steps, global_step = True, 10, 0


def _train(steps: int) -> None:
    progress, state = TrainingProgress(), State()
    progress.on_train_begin(None, state, None)
    for step in range(1, steps + 1):
        state.global_step = step
        progress.on_step_end(None, state, None)
        progress.on_log(None, state, None, {"loss": 2.5, "tokens_per_second": 1000.0})
        if step == 3:
            print("Something happened.")
    progress.on_train_end()


def test_a_sentence_does_not_tear_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    _train(10)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in screen.getvalue().split("\n")]
    line = next(line for line in lines if "Something" in line)
    assert line.rpartition("\r")[2] == "Something happened."
    assert any("training" in line and "step 10 of 10, loss 2.500, 1,000 tokens/s" in line for line in lines)


def test_a_pipe_gets_a_plain_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _train(10)
    assert capsys.readouterr() == ("Something happened.\n", "")
    clock = iter(range(0, 1000, 13))
    monkeypatch.setattr("saobp.progress.monotonic", lambda: next(clock))
    _train(10)
    assert capsys.readouterr().err.splitlines() == [
        "training: 50%, step 5 of 10, loss 2.500, 1,000 tokens/s",
        "training: 100%, step 10 of 10, loss 2.500, 1,000 tokens/s",
    ]


def test_an_error_of_training_leaves_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(PretrainTrainer, "evaluate", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_small(small_recipe(steps=4), tmp_path, progress=True)
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert screen.getvalue().rfind(shown) > screen.getvalue().rfind(hidden) >= 0, "the cursor stays hidden"


def test_warnings_and_logs_become_sentences() -> None:
    heard: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with plain_sentences(heard.append):
            warnings.warn("the strength is large")
            warnings.warn("an option will go", FutureWarning)
        shown = warnings.showwarning
    assert heard[0] == "Note: the strength is large"
    assert not any("option" in sentence for sentence in heard)
    assert shown.__name__ != "speak"


def test_the_packages_log_is_said_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("saobp")
    monkeypatch.setattr(logger, "propagate", False)
    heard: list[str] = []
    with plain_sentences(heard.append):
        logger.warning("%d heads left", 2)
    assert heard == ["Note: 2 heads left"]
    assert not logger.handlers

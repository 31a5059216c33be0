"""Sentences in the middle of a run: they stand above the bar and say no place in the source."""

from __future__ import annotations

import io
import logging
import warnings

import pytest

from saobp.training.progress import ProgressBar, above_the_bar, plain_sentences


class State:
    is_world_process_zero, max_steps, global_step = True, 10, 0


def test_a_sentence_does_not_tear_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("sys.stdout", screen)
    bar = ProgressBar()
    bar.on_train_begin(None, State, None)
    State.global_step = 3
    bar.on_step_end(None, State, None)
    bar.on_log(None, State, None, {"loss": 2.5, "tokens_per_second": 1000.0})
    above_the_bar(lambda sentence: print(sentence))("Something happened.")
    bar.on_train_end()
    line = next(line for line in screen.getvalue().split("\n") if "Something" in line)
    assert line.rpartition("\r")[2] == "Something happened."


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

"""The throughput benchmark, tiny and on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from saobp.benchmarking import pretraining as throughput
from saobp.benchmarking.table import BenchmarkTable
from saobp.benchmarking.timed_training import LONG, Trace, union
from saobp.cli import app


def test_every_version_is_timed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With graphs of both passes but no code generated for them, which takes most of a minute on a CPU."""
    original = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: original(function, **{**options, "backend": "aot_eager", "mode": None}),
    )
    arguments = (
        "bench pretraining --models bert-tiny --seconds 0.02 --turns 1 --versions transformers,high-0.1"
    )
    result = CliRunner().invoke(app, [*arguments.split(), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "pretraining.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| bert-tiny"))
    numbers = [float(cell) for cell in row.split("|")[3:-1]]
    assert len(numbers) == 4, "two rates, their ratio, steps a second of ours"
    assert all(number > 0 for number in numbers)
    assert (tmp_path / "pretraining.csv").exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--versions turbo", "'turbo' is none of the versions"),
        ("--models bert-huge", "there is no model 'bert-huge' to time"),
        ("--models bert-mini@none", "'bert-mini@none' is no model at a batch size"),
        ("--models bert-mini@0", "'bert-mini@0' is no model at a batch size"),
    ],
)
def test_wrong_options_are_named(option: str, words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "pretraining", *option.split()], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in result.output


def test_every_finished_row_and_every_model_left_out_is_saved_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages: list[str] = []

    def row(name: str, *_: Any) -> dict[str, Any]:
        clock.append(clock[-1] + 60)
        return {"model": name}

    def save(table: BenchmarkTable) -> None:
        pages.append(table.write(tmp_path)[0].read_text())

    clock = [0.0]
    monkeypatch.setattr(throughput, "_row", row)
    monkeypatch.setattr(throughput.time, "monotonic", lambda: clock[-1])
    throughput.pretraining_speed(names=["one", "two", "three", "four"], versions=(), limit=100.0, save=save)
    assert [page.count("\n| ") - 1 for page in pages] == [1, 2, 2, 2]
    assert [page.count("left out, because 100 seconds had passed") for page in pages] == [0, 0, 1, 2]
    assert "three: left out" in pages[2]


def test_kernels_that_overlap_count_once() -> None:
    assert union([]) == []
    assert union([(10, 20), (0, 4), (2, 5), (3, 4), (20, 21)]) == [(0, 5), (10, 21)]


def test_short_gaps_are_idle_and_long_ones_waiting() -> None:
    """Two steps, each of two kernels of 40 microseconds one apart; the program is late by 18 in between."""
    spans = [(100.0, 140.0), (141.0, 181.0), (199.0, 239.0), (240.0, 280.0)]
    trace = Trace.of(spans, steps=2)
    assert trace.kernels == 2
    assert trace.milliseconds == pytest.approx(0.080)
    assert trace.waiting == pytest.approx(18 / 180)
    assert trace.idle_share(0.1) == pytest.approx(0.2)
    assert trace.idle_share(0.079) == 0
    assert Trace.of([], steps=2) == Trace(0, 0, 0)
    assert Trace.of([(0, 10), (10 + LONG, 30)], steps=1).waiting == 0

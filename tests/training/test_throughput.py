"""The throughput benchmark, tiny and on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from saobp.training.throughput import covered_by


@pytest.fixture
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "pretraining.py"
    spec = importlib.util.spec_from_file_location("pretraining_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_version_is_timed(
    benchmark: ModuleType,
    capsys: pytest.CaptureFixture[str],
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
    arguments = "--sizes tiny --device cpu --seconds 0.02 --turns 1 --versions transformers,high-0.1"
    benchmark.main([*arguments.split(), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("| bert-tiny"))
    numbers = [float(cell) for cell in row.split("|")[3:-1]]
    assert len(numbers) == 3
    assert all(number > 0 for number in numbers)
    assert (tmp_path / "pretraining.csv").exists()


def test_wrong_flags_are_named(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cpu", "--versions", "turbo"])
    assert "unknown version 'turbo'" in capsys.readouterr().err


def test_kernels_that_overlap_count_once() -> None:
    assert covered_by([]) == 0
    assert covered_by([(5, 15)]) == 10
    assert covered_by([(10, 20), (0, 4), (2, 5), (3, 4)]) == 15

"""Scripts that train existing models on: who makes which run, what is trained, and the table."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saobp.storage.json_files import write_json
from saobp.testing.scripts import load_script
from saobp.testing.tiny_models import VOCABULARY, tiny_model

pairs = load_script("benchmarks/paired_runs.py")
decoder = load_script("benchmarks/existing_decoder.py")
encoder = load_script("benchmarks/existing_encoder.py")


def test_each_run_goes_to_one_process_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "claims").mkdir()
    names = ["a", "b", "c", "d"]
    first, second = pairs.claimed(tmp_path, names), pairs.claimed(tmp_path, names)
    assert [next(first), next(second), next(first)] == ["a", "b", "c"]
    monkeypatch.setenv(pairs.DEADLINE, str(time.time() - 1))
    assert list(pairs.claimed(tmp_path, names)) == []
    assert "no time left for a" in capsys.readouterr().out


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A tiny decoder and tokens for it."""
    for name, value in {"LENGTH": 8, "BATCH": 2, "EVALUATION_BATCH": 2}.items():
        monkeypatch.setattr(decoder, name, value)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    drawn = np.random.default_rng(0)
    for part, blocks in (("train", 6), ("held-out", 3)):
        np.save(
            tmp_path / f"wikipedia-{part}.npy", drawn.integers(5, VOCABULARY, 8 * blocks).astype(np.uint16)
        )
    return str(tmp_path / "model"), tmp_path


@pytest.mark.parametrize("method", ["plain", "learned", "strengths"])
def test_what_each_way_trains(folders: tuple[str, Path], method: str) -> None:
    run: Any = decoder.Continuation(*folders, "wikipedia", method, 1)
    start = {name: one.detach().clone() for name, one in run.model.named_parameters()}
    found = run.whole(5)
    assert found["steps"] == 3, "at most one epoch"
    assert found["tokens"] == 48
    moved = {name for name, one in run.model.named_parameters() if not torch.equal(one, start[name])}
    strengths = {name for name in start if name.endswith("strength_bias")}
    assert bool(strengths) == (method != "plain")
    assert strengths <= moved
    assert bool(moved - strengths) == (method != "strengths")
    assert found["before"] == pytest.approx(run.before)
    assert found["after"] != found["before"]


def test_the_table_compares_in_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = {"plain": (3.0, 3.1, 3.2), "learned": (2.9, 3.01, 3.1), "strengths": (3.5, 3.5, 3.5)}
    for method, losses in after.items():
        for seed, loss in enumerate(losses):
            run = {"corpus": "wikipedia", "method": method, "seed": seed, "tokens": 48, "before": 3.5}
            write_json(tmp_path / f"wikipedia-{method}-{seed}.json", {**run, "after": loss})
    decoder.table(tmp_path)
    shown = capsys.readouterr().out
    assert "| wikipedia | learned - plain | 48 | 3 | 3.10000 | 3.00333 | -0.09667 [" in shown
    compared = json.loads((tmp_path / "summary.json").read_text())["comparisons"]
    assert compared["wikipedia: learned - plain"]["verdict"] == "gain"
    assert compared["wikipedia: strengths alone - before"]["verdict"] != "gain"


def test_scores_of_encoders_are_compared_over_whole_seeds(tmp_path: Path) -> None:
    """RTE has two seeds, MRPC one: the mean of tasks has one pair."""
    scores = {("rte", 1): (60.0, 61.0), ("rte", 2): (62.0, 62.5), ("mrpc", 1): (80.0, 79.0)}
    recipe = dict.fromkeys(("epochs", "batch", "rate", "strength_rate", "length"), 1)
    for (task, seed), found in scores.items():
        for method, score in zip(("plain", "learned"), found, strict=True):
            folder = tmp_path / task / method / str(seed)
            own, rows = folder / f"seed-{seed}", {"train": 8, "validation": 4}
            own.mkdir(parents=True)
            write_json(folder / "result.json", {"metric": "accuracy", "rows": rows, "last": {"mean": score}})
            write_json(own / "recipe.json", recipe)
            write_json(own / "record.json", {"commit": "abc", "data": {}, "environment": {}})
            (own / "health.jsonl").write_text(json.dumps({"step": 1, "strengths": [[0.123456]]}) + "\n")
    encoder.table(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tasks"]["rte"]["difference"] == pytest.approx(0.75)
    assert summary["tasks"]["mean"]["pairs"] == 1
    assert summary["tasks"]["mean"]["difference"] == pytest.approx(0.0)
    assert summary["strengths"]["mrpc"]["1"] == [[0.1235]]
    assert summary["facts"]["rte"]["commit"] == "abc"

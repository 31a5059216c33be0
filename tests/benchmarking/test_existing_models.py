"""Scripts that train existing models on: who makes which run, what is trained, and the table."""

from __future__ import annotations

import copy
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from saobp.storage.json_files import write_json
from saobp.testing.scripts import load_script
from saobp.testing.tiny_models import VOCABULARY, tiny_model
from saobp.training.compiled_step import free_memory

pairs = load_script("benchmarks/paired_runs.py")
decoder = load_script("benchmarks/existing_decoder.py")
training = sys.modules["decoder_training"]
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
    monkeypatch.setattr(training, "LENGTH", 8)
    monkeypatch.setattr(training, "EVALUATION_BATCH", 2)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    drawn = np.random.default_rng(0)
    for part, blocks in (("train", 6), ("held-out", 3)):
        np.save(
            tmp_path / f"wikipedia-{part}.npy", drawn.integers(5, VOCABULARY, 8 * blocks).astype(np.uint16)
        )
    return str(tmp_path / "model"), tmp_path


@pytest.mark.parametrize("method", training.METHODS)
def test_what_each_way_trains(folders: tuple[str, Path], method: str) -> None:
    run: Any = training.Continuation(*folders, "wikipedia", method, 1, 2)
    start = {name: one.detach().clone() for name, one in run.model.named_parameters()}
    found = run.whole(5)
    assert found["steps"] == 3, "at most one epoch"
    assert found["tokens"] == 48
    assert found["batch"] == 2
    moved = {name for name, one in run.model.named_parameters() if not torch.equal(one, start[name])}
    of_heads = {name for name in start if name.endswith(("strength_bias", "head_bias"))}
    assert bool(of_heads) == (method != "plain")
    assert of_heads <= moved
    assert bool(moved - of_heads) == (method not in training.ALONE)
    assert found["before"] == pytest.approx(run.before)
    assert found["after"] != found["before"]
    numbers = found["log_scales" if method == "temperatures" else "strengths"]
    if method != "plain":
        own = dict(run.model.named_parameters())
        assert numbers == [own[name].tolist() for name in own if name in of_heads]


@pytest.mark.parametrize("method", ["learned", "temperatures"])
def test_training_starts_from_the_model_as_it_was(folders: tuple[str, Path], method: str) -> None:
    run: Any = training.Continuation(*folders, "wikipedia", method, 1, 2)
    assert training.held_out_loss(run.model, run.held) == pytest.approx(run.before, abs=5e-3)


def test_training_is_that_of_a_plain_loop(folders: tuple[str, Path]) -> None:
    run: Any = training.Continuation(*folders, "wikipedia", "plain", 3, 2)
    model = copy.deepcopy(run.model).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    losses = []
    for number, rate in enumerate((1.0, 1.0, 0.5)):
        optimiser.param_groups[0]["lr"] = 1e-4 * rate
        ids = run.train[order[2 * number : 2 * number + 2]]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    found = run.whole(3)
    assert found["losses"] == pytest.approx(losses, abs=1e-3)
    assert found["after"] == pytest.approx(training.held_out_loss(model, run.held), abs=1e-4)


@pytest.mark.parametrize(("method", "graphs"), [("plain", 2), ("learned", 2), ("strengths", 3)])
def test_compiled_layers_share_a_graph(
    folders: tuple[str, Path], method: str, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph of layers (the first has inputs without gradient where weights are frozen) and the loss."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    free_memory()
    eager: Any = training.Continuation(*folders, "wikipedia", method, 1, 2)
    losses = eager.whole(3)["losses"]
    compiled: Any = training.Continuation(*folders, "wikipedia", method, 1, 2)
    compiled.compile()
    assert compiled.whole(3)["losses"] == pytest.approx(losses, abs=2e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    free_memory()


def test_progress_is_shown_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = training.Progress("run", 100)
    progress.show(1, torch.tensor(2.0))
    assert not capsys.readouterr().out
    monkeypatch.setattr(training, "PROGRESS_SECONDS", 0.0)
    progress.show(3, torch.tensor(1.5))
    assert "run: step 3, 300 tokens, loss 1.5000, " in capsys.readouterr().out


def test_pace_does_not_wait_for_a_process_that_died(
    folders: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = training.Continuation(*folders, "wikipedia", "plain", 0, 2)
    assert run.timed(folders[1], 1, warm=1, steps=1)["tokens_per_second"] > 0
    monkeypatch.setattr(training, "LONGEST_WAIT", 0.0)
    with pytest.raises(TimeoutError, match="of 2 processes some were not ready"):
        run.timed(folders[1], 2, warm=1, steps=1)


def test_runs_of_weights_come_before_those_of_heads_alone() -> None:
    found = decoder.queue(["wikipedia"], ["plain", "learned", "strengths"], ["1", "2"])
    weights = ["plain-1", "learned-1", "plain-2", "learned-2"]
    assert found == [f"wikipedia-{one}" for one in (*weights, "strengths-1", "strengths-2")]


def _result(method: str, seed: int, after: float, tokens: int = 48) -> dict[str, Any]:
    run = {"corpus": "wikipedia", "method": method, "seed": seed, "tokens": tokens, "before": 3.5}
    heads = {"strengths": None if method == "plain" else [[0.1, -0.2], [0.0, 0.01 * seed]]}
    return {**run, **heads, "after": after}


def test_the_table_compares_in_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = {"plain": (3.0, 3.1, 3.2), "learned": (2.9, 3.01, 3.1), "strengths": (3.5, 3.5, 3.5)}
    after["temperatures"] = (3.4, 3.41, 3.42)
    for method, losses in after.items():
        for seed, loss in enumerate(losses):
            tokens = 48 if method in ("plain", "learned") else 24
            write_json(tmp_path / f"wikipedia-{method}-{seed}.json", _result(method, seed, loss, tokens))
    decoder.table(tmp_path)
    shown = capsys.readouterr().out
    assert "| 1 | 3.1000 | 3.0100 | 3.5000 | 3.4100 |" in shown
    assert "| wikipedia | learned - plain | 48 | 3 | 3.10000 | 3.00333 | -0.09667 [" in shown
    assert "| wikipedia | strengths alone - temperatures alone | 24 | 3 | 3.41000 | 3.50000 | " in shown
    summary = json.loads((tmp_path / "summary.json").read_text())
    compared = summary["comparisons"]
    assert compared["wikipedia: learned - plain"]["verdict"] == "gain"
    assert compared["wikipedia: strengths alone - before"]["verdict"] != "gain"
    assert compared["wikipedia: strengths alone - temperatures alone"]["verdict"] == "loss"
    heads = summary["heads"]["wikipedia: learned"]
    assert (heads["heads"], heads["least"], heads["most"]) == (4, -0.2, 0.1)
    assert (heads["heads above"], heads["heads below"], heads["share near 0"]) == (1, 1, 0.5)


def test_the_table_refuses_runs_of_different_lengths(tmp_path: Path) -> None:
    for seed, tokens in ((1, 48), (2, 24)):
        write_json(tmp_path / f"wikipedia-plain-{seed}.json", _result("plain", seed, 3.0, tokens))
    with pytest.raises(typer.BadParameter, match=r"differ in tokens, \[24, 48\]"):
        decoder.table(tmp_path)


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


def test_a_plan_that_does_not_exist_is_named(tmp_path: Path) -> None:
    folders = [f"--{name}={tmp_path}" for name in ("model", "data-dir", "out")]
    found = CliRunner().invoke(encoder.app, ["run", "--plan=bert", *folders])
    assert found.exit_code == 2
    assert "'bert' is not a plan: choose minilm or mpnet" in " ".join(found.output.split())

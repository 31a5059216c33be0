"""BLiMP and GLUE of pretraining runs: what is measured next, where results lie, kills, packing."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from saobp.data.tasks import GLUE
from saobp.lab.arena_records import GLUE_TASKS, recorded, scores_of
from saobp.lab.synthetic_tasks import write_tasks
from saobp.testing.scripts import load_script
from saobp.testing.tiny_training import small_recipe, train_small
from saobp.training.finetune import recipe_for

tasks = load_script("benchmarks/arena_tasks.py")
arena_runs = load_script("benchmarks/arena_runs.py")
SENTENCES = ["the cat walks near the river", "a dog sleeps under the old house", "the stone runs"]


def empty_run(runs: Path, name: str, seed: int, *, has_model: bool = True) -> None:
    (runs / name / "model").mkdir(parents=True)
    if not has_model:
        (runs / name / "model").rmdir()
    (runs / name / "recipe.json").write_text(json.dumps({"kind": "pretrain", "seed": seed}))
    (runs / name / "result.json").write_text("{}")


def test_one_seed_after_the_other_and_nothing_twice(tmp_path: Path) -> None:
    empty_run(tmp_path, "b-0.5-11", 11)
    empty_run(tmp_path, "a-12", 12)
    empty_run(tmp_path, "a-11", 11)
    empty_run(tmp_path, "a-13", 13, has_model=False)
    asked = (tmp_path, "*", ["rte", "blimp", "mnli"])
    wanted = [f"{task}.{run}" for task in ("blimp", "mnli", "rte") for run in ("a-11", "b-0.5-11")]
    wanted += ["blimp.a-12", "mnli.a-12", "rte.a-12"]
    assert tasks.open_measurements(*asked) == wanted
    for name in ("mnli.b-0.5-11", "blimp.a-12"):
        tasks.place(tmp_path, name).mkdir(parents=True)
        (tasks.place(tmp_path, name) / "result.json").write_text("{}")
        wanted.remove(name)
    assert (tmp_path / "b-0.5-11" / "glue" / "mnli" / "result.json").exists()
    assert tasks.open_measurements(*asked) == wanted
    assert tasks.open_measurements(tmp_path, "*-12", ["blimp", "mnli", "rte"]) == ["mnli.a-12", "rte.a-12"]


def test_a_trial_with_few_rows_does_not_count_as_the_measurement(tmp_path: Path) -> None:
    empty_run(tmp_path / "runs", "a-11", 11)
    (name,) = tasks.open_measurements(tmp_path / "runs", "*", ["rte"], 4)
    trial = tasks.place(tmp_path / "runs", name, 4)
    trial.mkdir(parents=True)
    (trial / "result.json").write_text("{}")
    assert not tasks.open_measurements(tmp_path / "runs", "*", ["rte"], 4)
    assert tasks.open_measurements(tmp_path / "runs", "*", ["rte"], 8) == [name]
    assert tasks.open_measurements(tmp_path / "runs", "*", ["rte"]) == [name]
    assert not list((tmp_path / "runs").rglob("glue"))


def test_the_steps_are_those_that_were_fixed() -> None:
    assert set(GLUE_TASKS) == set(GLUE) - {"wnli"}
    files = {"mnli": 29_340, "qqp": 22_256, "qnli": 12_259}
    rows = {task: min(tasks.ROWS, files.get(task, GLUE[task].official["train"])) for task in GLUE_TASKS}
    steps = sum(recipe_for(task).epochs * -(-count // recipe_for(task).batch) for task, count in rows.items())
    assert f"is {steps:,} steps a model" in tasks.__doc__


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Output folder with small pretraining runs of two methods, and made-up tasks in ``data``."""
    for method in (None, "high:learned"):
        recipe = small_recipe(steps=3, seed=11, family="modernbert", refinement=method, health_texts=0)
        train_small(recipe, tmp_path / "out" / "runs" / f"{method or 'none'}-11".replace(":", "-"))
    write_tasks(tmp_path / "data", 12)
    columns = {"sentence_good": SENTENCES, "sentence_bad": SENTENCES[::-1], "field": ["syntax"] * 3}
    (tmp_path / "data" / "blimp").mkdir()
    table = pa.table({**columns, "UID": ["one"] * 3, "pairID": range(3)})
    pq.write_table(table, tmp_path / "data" / "blimp" / "test.parquet")
    return tmp_path


def test_results_lie_where_the_page_looks_for_them(pretrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, file = pretrained / "out", pretrained / "records.tar.xz"

    def in_this_process(_: str, folder: Path, given: list[Any], workers: int) -> None:
        assert workers == 2
        (folder / "claims").mkdir(parents=True, exist_ok=True)
        tasks.work(folder, json.dumps(given))

    monkeypatch.setattr(tasks, "run_workers", in_this_process)
    words = ["run", "--out", str(out), "--data-dir", str(pretrained / "data"), "--workers", "2"]
    done = CliRunner().invoke(tasks.app, [*words, "--only", "nothing,high-*"])
    assert done.exit_code == 0, done.output
    assert "9 done; not done: none" in done.output
    done = CliRunner().invoke(tasks.app, [*words, "--tasks", "blimp,rte"])  # of the other run
    assert "2 done; not done: none" in done.output
    arena_runs.pack(out, file)
    with tarfile.open(file) as archive:
        archive.extractall(pretrained / "back", filter="data")
    assert not [path for path in (pretrained / "back").rglob("*") if path.name in ("model", "blimp.csv")]
    records = recorded([pretrained / "back" / "runs"])
    scores = scores_of(records["high-learned-11"])
    assert set(scores) == {"blimp", "glue", *GLUE_TASKS}
    assert scores["glue"] == pytest.approx(sum(scores[task] for task in GLUE_TASKS) / 8)
    assert set(records["none-11"]["glue"]) == {"rte"}
    assert set(scores_of(records["none-11"])) == {"blimp"}
    for name in records:
        recipe = json.loads((out / "runs" / name / "glue" / "rte" / "seed-11" / "recipe.json").read_text())
        assert (recipe["rate"], recipe["length"], recipe["epochs"]) == (3e-4, 128, 5)
        assert (recipe["refinement"] is None) == (name == "none-11")


def test_a_failed_measurement_keeps_no_other_from_its_turn(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (pretrained / "claims").mkdir()
    runs = pretrained / "out" / "runs"
    names = ["blimp.none-11", "mrpc.none-11", "blimp.high-learned-11"]
    given = json.dumps([str(runs), str(pretrained / "data"), 4, names])
    (runs / "none-11" / "model" / "model.safetensors").write_bytes(b"damaged")
    tasks.work(pretrained, given)
    assert "Traceback" in capsys.readouterr().err
    kept = [tasks.place(runs, name, 4).joinpath("result.json").exists() for name in names]
    assert kept == [False, False, True]

    started: list[list[str]] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def restart(_: str, line: list[str]) -> None:
        started.append(line)
        raise SystemExit

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "execv", restart)
    (pretrained / "claims" / "blimp.none-11").unlink()
    with pytest.raises(SystemExit):
        tasks.work(pretrained, given)
    assert len(started) == 1

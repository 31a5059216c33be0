"""The runs of the arena's plan: comparable recipes, the rule of choice, an order that survives kills."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab.arena_records import method_of, settings_of
from saobp.refinement import Refinement
from saobp.testing.scripts import ROOT, load_script

runs = load_script("benchmarks/arena_runs.py")
plan = runs.sys.modules["arena_plan"]
RECORDS: list[dict[str, Any]] = json.loads((ROOT / "results" / "arena" / "runs.json").read_text())
OLDER = [record for record in RECORDS if record["started"] < "2026-11-17T12"]
BEFORE = plan.losses_of(OLDER)


@pytest.fixture(autouse=True)
def runs_before_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "records.json").write_text(json.dumps(OLDER))
    monkeypatch.setattr(runs, "RECORDS", tmp_path / "records.json")


def test_recipes_are_those_of_the_recorded_runs() -> None:
    recorded = next(record for record in RECORDS if record["run"] == "modernbert-mini-original-42")
    recipe = {"kind": "pretrain", **plan.Run(plan.Form("gate"), 42).recipe.to_dict()}
    (setting,) = settings_of([recorded, {**recorded, "recipe": recipe}])
    assert set(setting.losses) == {"none", "gate"}


def test_the_plan_names_the_candidates() -> None:
    page = (ROOT / "results" / "arena" / "plan.md").read_text()
    for form in (*plan.CANDIDATES, plan.PART_OF_ROWS):
        assert f"`{form.refinement}`" in page
        assert str(Refinement.of(form.refinement)) == form.refinement


@pytest.mark.parametrize("form", [plan.CANDIDATES[0], plan.CANDIDATES[5], plan.CANDIDATES[9]])
def test_a_record_names_the_command_that_makes_the_run_again(form: Any) -> None:
    run = plan.Run(form, 1)
    done = CliRunner().invoke(app, [*run.command[1:], "--dry-run"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == json.loads(json.dumps(run.recipe.to_dict()))


def test_the_lowest_mean_is_chosen_among_forms_with_all_seeds() -> None:
    losses = {
        "high:learned+gate": {42: 3.30, 1: 3.31, 2: 3.32, 3: 9.0},
        "high:learned+qk-norm": {42: 3.0, 1: 3.0},  # lacks a seed
        "high:learned+temperature": {42: 3.32, 1: 3.32, 2: 3.32},
        "temperature": {42: 1.0, 1: 1.0, 2: 1.0},  # no candidate
        "high:learned+alternating": {42: 3.0, 1: 3.0, 2: float("nan")},
    }
    form, means, left_out = plan.choose(losses)
    assert form.refinement == "high:learned+gate"
    assert form.rival == plan.Form("gate")
    assert set(means) == {"high:learned+gate", "high:learned+temperature"}
    assert {"high:learned+qk-norm", "high:learned+alternating"} < set(left_out)


def finish(queue: Any, run: Any, loss: float) -> None:
    folder = queue.folder(run)
    folder.mkdir(parents=True)
    recipe = {"kind": "pretrain", **run.recipe.to_dict()}
    for name, content in (
        ("recipe", recipe),
        ("record", {"status": "finished"}),
        ("result", {"eval_loss": loss}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_choice_confirmation_and_the_rest_follow_each_other(tmp_path: Path) -> None:
    later = time.time() + 10_000
    queue, other = (runs.Queue(tmp_path, later, later) for _ in range(2))
    wanted = list(plan.choice_runs(BEFORE))
    best = "high:learned+qk-norm+gate"
    for number, run in enumerate(wanted):
        claimed = (queue, other)[number % 2].claim()
        assert claimed == run
        if "message-gate" in run.form.refinement:
            (queue.claim_of(run) / "failed").write_text("out of memory")
        elif run != wanted[-1]:
            finish(queue, run, 3.0 if run.form.refinement == best else 3.2)
    first = queue.claim()  # the last run of the choice is still running
    assert (first.form.refinement, first.seed) == ("none", 6)
    assert not (tmp_path / "chosen.json").exists()
    finish(queue, wanted[-1], 3.1)
    order = []
    while (run := queue.claim()) is not None:
        order.append((run.form.refinement, run.seed, run.family))
    said = json.loads((tmp_path / "chosen.json").read_text())
    assert said["chosen"]["refinement"] == best
    assert said["left_out"] == ["high:learned+message-gate"]
    fresh = [(name, seed, "modernbert") for name in ("none", best) for seed in (6, 7, 8, 9, 10)]
    assert order[:9] == fresh[1:]
    assert order[9:12] == [(plan.PART_OF_ROWS.refinement, seed, "modernbert") for seed in (42, 1, 2)]
    rest = ["qk-norm+gate", "temperature", "high:learned"]
    assert [name for name, *_ in order[12:27]] == [name for name in rest for _ in range(5)]
    assert sum(family == "llama" for *_, family in order) == runs.DECODERS_AT_ONCE
    assert len(set(order)) == len(order)


def test_a_second_call_goes_on_and_keeps_the_choice(tmp_path: Path) -> None:
    later = time.time() + 10_000
    queue = runs.Queue(tmp_path, later, later)
    first, second = queue.claim(), queue.claim()
    finish(queue, first, 3.1)
    queue.folder(second).mkdir(parents=True)
    again = runs.Queue(tmp_path, later, later)
    again.clear_unfinished()
    assert again.is_running(second)
    queue.held.clear()  # killed while it ran
    assert not again.is_running(second)
    again.clear_unfinished()
    assert again.claim() == second
    assert not again.folder(second).exists()
    finish(again, second, 3.1)
    ended = runs.Queue(tmp_path, later, time.time() - 1)  # the choice's time is over: two forms are whole
    assert ended.chosen() == plan.Form("high:learned+temperature")
    assert runs.Queue(tmp_path, later, later).claim().seed == 6  # more choice runs would change nothing


def test_a_run_whose_process_died_does_not_hold_up_the_choice(tmp_path: Path) -> None:
    later, past = time.time() + 10_000, time.time() - 1
    queue = runs.Queue(tmp_path, later, later)
    claimed = [queue.claim() for _ in range(2)]
    finish(queue, claimed[0], 3.1)
    assert runs.Queue(tmp_path, later, past).chosen() is None
    queue.held.clear()
    assert runs.Queue(tmp_path, later, past).chosen() == plan.Form("high:learned+temperature")


def test_what_is_recorded_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RECORDS", ROOT / "results" / "arena" / "runs.json")
    later = time.time() + 10_000
    queue = runs.Queue(tmp_path, later, later, candidates=2)
    assert queue.claim() == plan.Run(plan.Form("temperature"), 10)
    assert queue.claim() == plan.Run(plan.LEARNED, 6)
    said = json.loads((tmp_path / "chosen.json").read_text())
    assert said["chosen"]["refinement"] == "high:learned+qk-norm+gate"


def test_no_run_starts_that_would_end_too_late(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, time.time() + 100, time.time() + 100, typical=150)
    assert queue.claim() is None
    queue.typical = 50
    assert queue.claim() is not None


def test_fewer_runs_side_by_side_end_sooner(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, time.time() + 100, time.time() + 100, typical=150, jobs=10)
    claimed = [queue.claim() for _ in range(8)]
    assert sum(run is not None for run in claimed) == 6  # a seventh would make all of them too late
    finish(queue, claimed[0], 3.0)
    assert queue.claim() is not None


def test_the_choice_may_be_among_the_first_candidates_only(tmp_path: Path) -> None:
    later = time.time() + 10_000
    queue = runs.Queue(tmp_path, later, later, candidates=2)
    wanted = list(plan.choice_runs(BEFORE, 2))
    assert [run.control for run in wanted] == [False] * 3 + [True] + [False] * 3
    for run in wanted:
        assert queue.claim() == run
        finish(queue, run, 3.4)
    assert queue.claim() == plan.Run(plan.Form("none"), 6)
    said = json.loads((tmp_path / "chosen.json").read_text())
    assert len(said["means"]) == 4  # two had been recorded
    assert said["chosen"]["refinement"] == "high:learned+temperature"


def test_forms_of_the_plan_are_methods_of_their_own() -> None:
    names = [method_of(plan.Run(form, 42).recipe.to_dict()) for form in plan.CANDIDATES]
    assert len(set(names)) == len(names) == 12
    assert "high:learned, rate times 4" in names

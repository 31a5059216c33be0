"""The runs of the arena's plan: recorded recipes, the rule of choice, an order that survives kills."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab.arena_records import method_of, settings_of
from saobp.refinement import Refinement
from saobp.testing.scripts import ROOT, load_script
from saobp.testing.tiny_training import prose, small_recipe

runs = load_script("benchmarks/arena_runs.py")
plan = runs.sys.modules["arena_plan"]
RECORDS: list[dict[str, Any]] = json.loads((ROOT / "results" / "arena" / "runs.json").read_text())
LATER = time.time() + 10_000


def test_the_usual_setting_is_that_of_the_recorded_runs() -> None:
    recorded = next(record for record in RECORDS if record["run"] == "modernbert-mini-original-42")
    recipe = {"kind": "pretrain", **plan.Run(plan.USUAL, "temperature", 42).recipe.to_dict()}
    (setting,) = settings_of([recorded, {**recorded, "recipe": recipe}])
    assert set(setting.losses) == {"none", "temperature"}


def test_the_plan_names_settings_methods_and_seeds() -> None:
    page = (ROOT / "results" / "arena" / "plan.md").read_text().split("# Round two")[1]
    for setting in plan.SETTINGS:
        assert f"`{setting}`" in page
    for form in plan.FORMS[1:]:
        assert f"`{form}`" in page
        assert str(Refinement.of(form)) == form
    assert f"{plan.FRESH_SEEDS[0]} to {plan.FRESH_SEEDS[-1]}" in page
    recorded = {record["recipe"]["seed"] for record in RECORDS if record["started"] < "2026-11-17T16"}
    assert not recorded & set(plan.FRESH_SEEDS)


@pytest.mark.parametrize("setting", list(plan.SETTINGS))
def test_a_record_names_the_command_that_makes_the_run_again(setting: str) -> None:
    run = plan.Run(setting, "high:learned+temperature", 11)
    done = CliRunner().invoke(app, [*run.command[1:], "--dry-run"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == json.loads(json.dumps(run.recipe.to_dict()))


@pytest.mark.parametrize("setting", list(plan.SETTINGS))
def test_every_setting_trains_on_as_many_tokens_and_numbers_per_head_at_one_rate(setting: str) -> None:
    recipe = plan.Run(setting, "high:learned", 11).recipe
    assert recipe.tokens == 98_304_000
    assert recipe.learning_rate * recipe.strength_rate == pytest.approx(0.01)
    assert method_of(recipe.to_dict()) == "high:learned"


def test_the_lowest_mean_is_chosen_among_settings_with_all_seeds() -> None:
    losses = {
        plan.USUAL: {42: 3.34, 9: 3.51},
        "muon": {42: 3.0},  # lacks a seed
        "muon-twice": {42: 3.0, 9: float("nan")},
        "warmup-600": {42: 3.36, 9: 3.40, 11: 1.0},
        "rate-3e-3": {42: 3.34, 9: 3.46},
    }
    setting, means, left_out = plan.choose(losses)
    assert setting == "warmup-600"
    assert means["warmup-600"] == pytest.approx(3.38)
    assert left_out == ["muon", "muon-twice", "masked-30-to-15", "batch-128", "averaged-tenth"]


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


def test_tuning_choice_confirmation_and_decoders_follow_each_other(tmp_path: Path) -> None:
    queue, other = (runs.Queue(tmp_path, LATER, LATER, decoders=True) for _ in range(2))
    wanted = list(plan.tuning_runs(5))
    assert len(wanted) == 10
    for number, run in enumerate(wanted):
        assert (queue, other)[number % 2].claim() == run
        if run.setting == "rate-3e-3" and run.seed == 9:
            (queue.claim_of(run) / "failed").write_text("out of memory")
        elif run != wanted[-1]:
            finish(queue, run, 3.2 if run.setting == "muon-twice" else 3.3)
    assert queue.claim() is None  # the last run of tuning may change the choice
    assert not queue.is_empty()
    finish(queue, wanted[-1], 3.1)
    order = []
    while (run := queue.claim()) is not None:
        order.append(run)
    said = json.loads((tmp_path / "chosen.json").read_text())
    assert said["chosen"] == "muon-twice"
    assert said["changes"] == {"optimizer": "muon", "muon_rate": 2.0}
    assert said["left_out"] == ["rate-3e-3", "batch-128", "averaged-tenth"]
    assert said["losses"][plan.USUAL] == {
        "42": pytest.approx(3.338, abs=1e-3),
        "9": pytest.approx(3.5134, abs=1e-4),
    }
    assert "chose muon-twice" in (tmp_path / "log.txt").read_text()
    assert {run.setting for run in order} == {"muon-twice"}
    assert [(run.seed, run.form) for run in order[:48]] == [(s, f) for s in range(11, 19) for f in plan.FORMS]
    decoders = order[48:]
    assert [(run.family, run.seed, run.form) for run in decoders] == [
        ("llama", 11, form) for form in plan.DECODER_FORMS
    ]
    assert len(decoders) == runs.DECODERS_AT_ONCE
    finish(queue, decoders[0], 3.0)
    assert queue.claim().seed == 12
    assert len({run.name for run in (*wanted, *order)}) == 10 + 51


def test_without_their_tokens_there_are_no_decoders(tmp_path: Path) -> None:
    (tmp_path / "chosen.json").write_text('{"chosen": "muon"}')
    queue = runs.Queue(tmp_path, LATER, LATER)
    assert {run.family for run in queue.planned()} == {"modernbert"}
    assert queue.claim() == plan.Run("muon", "none", 11)


def test_a_second_call_goes_on_and_keeps_the_choice(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER, LATER)
    first, second, third = (queue.claim() for _ in range(3))
    finish(queue, first, 3.1)
    finish(queue, second, 3.1)
    queue.folder(third).mkdir(parents=True)
    again = runs.Queue(tmp_path, LATER, LATER)
    again.clear_unfinished()
    assert again.is_running(third)
    queue.held.clear()  # killed while it ran
    assert not again.is_running(third)
    again.clear_unfinished()
    assert not again.folder(third).exists()
    assert again.claim() == third
    again.held.clear()
    ended = runs.Queue(tmp_path, LATER, time.time() - 1)  # tuning's time is over: two settings are whole
    assert ended.chosen() == first.setting
    later = runs.Queue(tmp_path, LATER, LATER)
    later.clear_unfinished()
    assert later.claim() == plan.Run(first.setting, "none", 11)  # more tuning would change nothing


def test_a_run_that_is_under_way_when_tuning_ends_still_counts(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER, LATER)
    claimed = [queue.claim() for _ in range(2)]
    finish(queue, claimed[0], 3.1)
    ended = runs.Queue(tmp_path, LATER, time.time() - 1)
    assert ended.claim() is None
    finish(queue, claimed[1], 3.1)
    assert ended.claim() == plan.Run(claimed[0].setting, "none", 11)


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


@pytest.fixture
def miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Tokens and output folder of a queue whose runs take a second: small models, few seeds."""
    text = tmp_path / "text.txt"
    text.write_text(prose(400))
    tokens = tmp_path / "tokens"
    options = ["--tokenizer", "train:60", "--out", str(tokens), "--processes", "1"]
    assert CliRunner().invoke(app, ["tokenize", str(text), *options]).exit_code == 0
    (tokens / "tokenizer-bert-60").rename(tokens / "tokenizer-bert")
    full = plan.Run.recipe.fget

    def small(run: Any) -> Any:
        made = full(run)
        shared = {"optimizer": made.optimizer, "refinement": made.refinement, "seed": made.seed}
        return small_recipe(**shared, family=run.family, health_texts=0, steps=4, corpus=str(text))

    monkeypatch.setattr(plan.Run, "recipe", property(small))
    monkeypatch.setattr(plan, "FRESH_SEEDS", (11, 12))
    return tokens, tmp_path / "out"


def test_the_whole_queue_in_miniature(miniature: tuple[Path, Path], tmp_path: Path) -> None:
    tokens, out = miniature
    for name in ("runs", "claims"):
        (out / name).mkdir(parents=True)
    runs.work(runs.Queue(out, LATER, LATER, settings=2), str(tokens))
    lines = (out / "log.txt").read_text().splitlines()
    assert len(lines) == 4 + 1 + 12
    assert sum(", loss " in line for line in lines) == 16
    chosen = json.loads((out / "chosen.json").read_text())["chosen"]
    names = [f"modernbert-mini-{chosen}-{form}-12" for form in ("original", "learned-temperature", "qk-norm")]
    assert all((out / "runs" / name / "model").is_dir() for name in names)
    runs.pack(out, tmp_path / "records.tar.xz")
    with tarfile.open(tmp_path / "records.tar.xz") as archive:
        archive.extractall(tmp_path / "back", filter="data")
    back = tmp_path / "back"
    assert not list(back.rglob("model"))
    assert (back / "chosen.json").exists()
    done = CliRunner().invoke(
        app, ["arena", str(back / "runs"), "--out", str(tmp_path / "results"), "--fresh", "11,12"]
    )
    assert done.exit_code == 0, done.output
    assert "fresh seeds 11, 12" in (tmp_path / "results" / "arena" / "README.md").read_text()

"""The runs of the arena's plan: recorded recipes, and an order that survives kills."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab.arena_records import settings_of
from saobp.refinement import Refinement
from saobp.testing.scripts import ROOT, load_script
from saobp.testing.tiny_training import prose, small_recipe

runs = load_script("benchmarks/arena_runs.py")
plan = runs.sys.modules["arena_plan"]
RECORDS: list[dict[str, Any]] = json.loads((ROOT / "results" / "arena" / "runs.json").read_text())
LATER = time.time() + 100_000


def test_rivals_are_compared_with_recorded_runs_of_the_same_recipe() -> None:
    recorded = next(one for one in RECORDS if one["run"] == "modernbert-mini-masked-30-to-15-original-16")
    recipe = {"kind": "pretrain", **plan.Run("gate", 16).recipe.to_dict()}
    (setting,) = settings_of([recorded, {**recorded, "recipe": recipe}])
    assert set(setting.losses) == {"none", "gate"}
    seeds = {one["recipe"]["seed"] for one in RECORDS}
    assert set(plan.RIVAL_SEEDS) <= seeds


def test_the_plan_names_settings_methods_and_seeds() -> None:
    page = (ROOT / "results" / "arena" / "plan.md").read_text().split("# Round four")[1]
    for setting in plan.SETTINGS:
        assert f"| {setting} |" in page
    for form in plan.RIVALS:
        assert f"`{form}`" in page
        assert str(Refinement.of(form)) == form
    for seeds in (plan.SETTING_SEEDS, plan.RIVAL_SEEDS):
        assert f"{seeds[0]} to {seeds[-1]}" in page


RUNS = {run.name: run for run in plan.planned_runs()}


def test_runs_have_names_of_their_own_and_recorded_pairs_are_not_made_again() -> None:
    assert len(RUNS) == len(list(plan.planned_runs())) == 2 * (3 + 3) + 8 * 8
    assert list(RUNS)[:2] == ["llama-mini-original-26", "llama-mini-learned-26"]
    assert list(RUNS)[2:4] == ["modernbert-small-original-26", "modernbert-small-learned-26"]
    names = {one["run"] for one in RECORDS}
    pairs = {
        (setting, seed)
        for setting, changes in plan.SETTINGS.items()
        for seed in plan.SETTING_SEEDS
        if {plan.Run(form, seed, **changes).name for form in (plan.ORIGINAL, plan.LEARNED)} <= names
    }
    assert pairs == plan.RECORDED


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith("learned-27")])
def test_a_record_names_the_command_that_makes_the_run_again(name: str) -> None:
    done = CliRunner().invoke(app, [*RUNS[name].command[1:], "--dry-run"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == json.loads(json.dumps(RUNS[name].recipe.to_dict()))


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith("learned-27")])
def test_every_setting_has_as_many_tokens_and_numbers_per_head_learn_at_one_rate(name: str) -> None:
    recipe = RUNS[name].recipe
    assert recipe.tokens == 98_304_000
    assert recipe.learning_rate * recipe.strength_rate == pytest.approx(0.01)
    assert recipe.refinement == Refinement.of("high:learned")


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


def test_processes_share_the_runs_in_order_and_few_large_ones_are_side_by_side(tmp_path: Path) -> None:
    queue, other = (runs.Queue(tmp_path, LATER, families=("modernbert", "llama")) for _ in range(2))
    wanted = [run for run in RUNS.values() if not run.is_large]
    large = [run for run in RUNS.values() if run.is_large]
    order = []
    while (run := (queue, other)[len(order) % 2].claim()) is not None:
        order.append(run)
    at_once = large[: runs.LARGE_AT_ONCE]
    assert order == [run for run in RUNS.values() if run in wanted or run in at_once]
    assert not queue.is_empty()
    finish(queue, large[0], 3.0)
    assert other.claim() == large[runs.LARGE_AT_ONCE]


def test_without_their_tokens_there_are_no_decoders(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER)
    assert {run.family for run in queue.planned} == {"modernbert"}


def test_a_second_call_goes_on_where_a_killed_one_was(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER)
    first, second = (queue.claim() for _ in range(2))
    finish(queue, first, 3.1)
    queue.folder(second).mkdir(parents=True)
    again = runs.Queue(tmp_path, LATER)
    again.clear_unfinished()
    assert again.is_running(second)
    queue.held.clear()  # killed while it ran
    assert not again.is_running(second)
    again.clear_unfinished()
    assert not again.folder(second).exists()
    assert again.claim() == second


def test_no_run_starts_that_would_end_too_late(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, time.time() + 100, typical=150)
    assert queue.claim() is None
    queue.typical = 50
    assert queue.claim() is not None


def test_fewer_runs_side_by_side_end_sooner(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, time.time() + 100, typical=150, jobs=10)
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
    monkeypatch.setattr(plan, "SETTINGS", {"small": {}})
    monkeypatch.setattr(plan, "SETTING_SEEDS", (21, 22))
    monkeypatch.setattr(plan, "RECORDED", set())
    monkeypatch.setattr(plan, "RIVALS", ("gate", "sinkhorn-3"))
    monkeypatch.setattr(plan, "RIVAL_SEEDS", (22,))
    return tokens, tmp_path / "out"


def test_the_whole_queue_in_miniature(miniature: tuple[Path, Path], tmp_path: Path) -> None:
    tokens, out = miniature
    for name in ("runs", "claims"):
        (out / name).mkdir(parents=True)
    runs.work(runs.Queue(out, LATER), str(tokens))
    lines = (out / "log.txt").read_text().splitlines()
    assert len(lines) == sum(", loss " in line for line in lines) == 6
    names = [f"modernbert-mini-{form}-22" for form in ("original", "learned", "gate", "sinkhorn-3")]
    assert all((out / "runs" / name / "model").is_dir() for name in names)
    runs.pack(out, tmp_path / "records.tar.xz")
    with tarfile.open(tmp_path / "records.tar.xz") as archive:
        archive.extractall(tmp_path / "back", filter="data")
    back = tmp_path / "back"
    assert not list(back.rglob("model"))
    assert (back / "log.txt").exists()
    done = CliRunner().invoke(
        app, ["arena", str(back / "runs"), "--out", str(tmp_path / "results"), "--fresh", "21,22"]
    )
    assert done.exit_code == 0, done.output
    assert "fresh seeds 21, 22" in (tmp_path / "results" / "arena" / "README.md").read_text()

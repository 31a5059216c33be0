"""The runs of the arena's plan: recorded recipes, and an order that survives kills."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_callback import CallbackHandler
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab.arena_records import method_of, settings_of
from saobp.refinement import Refinement
from saobp.testing.scripts import ROOT, load_script
from saobp.testing.tiny_training import prose, small_recipe

runs = load_script("benchmarks/arena_runs.py")
plan = runs.sys.modules["arena_plan"]
RECORDS: list[dict[str, Any]] = json.loads((ROOT / "results" / "arena" / "runs.json").read_text())
LATER = time.time() + 100_000
FORMS = ("original", "learned")


def test_rivals_are_compared_with_recorded_runs_of_the_same_recipe() -> None:
    recorded = next(one for one in RECORDS if one["run"] == "modernbert-mini-masked-30-to-15-original-16")
    recipe = {"kind": "pretrain", **plan.Run("gate", 16).recipe.to_dict()}
    (setting,) = settings_of([recorded, {**recorded, "recipe": recipe}])
    assert set(setting.losses) == {"none", "gate"}
    seeds = {one["recipe"]["seed"] for one in RECORDS}
    assert set(plan.RIVAL_SEEDS) <= seeds


def test_the_plan_names_settings_methods_and_seeds() -> None:
    six, seven = (
        (ROOT / "results" / "arena" / "plan.md").read_text().split("# Round six")[1].split("# Round seven")
    )
    for setting in (*plan.TUNING, *plan.OTHERS):
        assert f"`{setting}`" in six
    for form in (*plan.COMPARED[1:], *plan.RIVALS):
        assert f"`{form}`" in seven
        assert str(Refinement.of(form)) == form
    for seeds in (plan.MANY_SEEDS, plan.PAIR_SEEDS):
        assert f"{seeds[0]} to {seeds[-1]}" in seven


RUNS = {run.name: run for run in plan.planned_runs("rate-2e-3")}


def test_runs_have_names_of_their_own_and_pairs_have_seeds_of_no_other_plan() -> None:
    first, rest = list(RUNS)[:120], list(RUNS)[120:]
    assert first[1::6] == [f"modernbert-mini-learned-{seed}" for seed in range(51, 71)]
    assert first[5] == "modernbert-mini-high-key-bias-learned-qk-norm-51"
    assert not {run.seed for run in plan.FIRST} & {one["recipe"]["seed"] for one in RECORDS}
    assert rest[0] == "modernbert-small-rate-2.8e-3-original-42"
    assert rest[10:12] == [f"modernbert-small-rate-2e-3-{form}-31" for form in FORMS]
    assert rest[20:22] == [f"modernbert-mini-books-{form}-31" for form in FORMS]
    assert rest[30] == "modernbert-medium-rate-2e-3-original-31"
    assert len(rest) == 10 + 2 * 10 + 4 + 6 * 8


@pytest.mark.parametrize("form", plan.COMPARED)
def test_what_comes_first_may_be_pooled_with_recorded_runs(form: str) -> None:
    """Of the same recipe but for the seed."""
    recipe = {"kind": "pretrain", **plan.Run(form, 51).recipe.to_dict()}
    partners = [one for one in RECORDS if one["recipe"]["seed"] == 11 and method_of(one["recipe"]) == form]
    assert any(len(settings_of([one, {**one, "recipe": recipe}])) == 1 for one in partners)


@pytest.mark.parametrize("name", list(RUNS)[:30:4] + [name for name in RUNS if name.endswith("learned-31")])
def test_a_record_names_the_command_that_makes_the_run_again(name: str) -> None:
    done = CliRunner().invoke(app, [*RUNS[name].command[1:], "--dry-run"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == json.loads(json.dumps(RUNS[name].recipe.to_dict()))


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_as_many_tokens_and_numbers_per_head_learn_at_one_rate(name: str) -> None:
    recipe = RUNS[name].recipe
    assert recipe.tokens == 98_304_000
    assert recipe.learning_rate * recipe.strength_rate == pytest.approx(0.01)
    assert recipe.size == name.split("-")[1]


def test_other_settings_differ_from_the_tuned_recipe_in_one_thing() -> None:
    def fields(run: Any) -> dict[str, Any]:
        return run.recipe.to_dict()

    usual = fields(plan.Run("none", 31))
    for setting, changes in plan.OTHERS.items():
        assert fields(plan.Run("none", 31, "mini", setting)) == {**usual, **changes}
    medium, small = (plan.Run("none", 31, size, "rate-2.8e-3").recipe for size in ("medium", "small"))
    assert medium.learning_rate == pytest.approx(2e-3)  # that of the recipe modern, as small's
    assert small.learning_rate == 2.8e-3


def test_the_first_setting_is_the_recipe_of_round_four() -> None:
    recorded = next(one for one in RECORDS if one["run"] == "modernbert-small-original-24")
    recipe = {"kind": "pretrain", **plan.Run("none", 24, "small", "rate-2.8e-3").recipe.to_dict()}
    assert len(settings_of([recorded, {**recorded, "recipe": recipe}])) == 1


def test_the_setting_with_the_lowest_mean_is_chosen_once_all_have_ended() -> None:
    losses: dict[Any, float | None] = {
        run: {"rate-2e-3": 3.1, "rate-1e-3": 3.0}.get(run.setting, 3.2) for run in plan.tuning_runs()
    }
    assert plan.chosen_setting(losses) == "rate-1e-3"
    losses[plan.Run("none", 9, "small", "rate-1e-3")] = 3.3
    assert plan.chosen_setting(losses) == "rate-2e-3"
    losses[plan.Run("none", 9, "small", "rate-2e-3")] = None  # it failed
    assert plan.chosen_setting(losses) == "rate-1e-3"
    losses[plan.Run("none", 42, "small", "rate-1e-3")] = float("nan")
    assert plan.chosen_setting(losses) == "rate-2.8e-3"
    del losses[plan.Run("none", 42, "small", "warmup-600")]
    assert plan.chosen_setting(losses) is None


@pytest.fixture
def usual_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes before the tuning of small."""
    monkeypatch.setattr(plan, "FIRST", ())


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


@pytest.mark.usefixtures("usual_order")
def test_processes_share_the_runs_and_pairs_follow_the_choice(tmp_path: Path) -> None:
    queue, other = (runs.Queue(tmp_path, LATER) for _ in range(2))
    tuning = [(queue, other)[number % 2].claim() for number in range(10)]
    assert tuning == list(plan.tuning_runs())
    assert other.claim() == plan.Run("none", 31, "mini", "books")  # nothing waits for the choice
    for run in tuning:
        assert queue.chosen() is None
        finish(queue, run, 3.0 if run.setting == "rate-1.4e-3" else 3.1)
    assert queue.chosen() == "rate-1.4e-3"
    assert other.claim() == plan.Run("none", 31, "small", "rate-1.4e-3")
    while queue.claim() is not None:
        pass
    assert queue.is_empty()


def test_a_second_call_goes_on_where_a_killed_one_was(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER)
    first, second = (queue.claim() for _ in range(2))
    finish(queue, first, 3.1)
    queue.folder(second).mkdir(parents=True)
    again = runs.Queue(tmp_path, LATER)
    assert again.is_running(second)
    queue.held.clear()  # killed while it ran
    assert not again.is_running(second)
    assert again.claim() == second


def test_an_error_of_cuda_ends_a_run_once_and_it_goes_on_from_its_checkpoint(
    miniature: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, out = miniature
    first = next(plan.tuning_runs())
    whole = runs.train(first, runs.Queue(out.with_name("whole"), LATER), str(tokens))
    step = CallbackHandler.on_step_end

    def fault(self: Any, args: Any, state: Any, control: Any) -> Any:
        if state.global_step == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step(self, args, state, control)

    def new_process(*_: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(runs.os, "execv", new_process)
        patched.setattr(CallbackHandler, "on_step_end", fault)
        with pytest.raises(InterruptedError):
            runs.work(runs.Queue(out, LATER), str(tokens))
    assert (
        (out / "log.txt").read_text().splitlines()[0].split(" ", 1)[1].startswith(f"lost {first.name}: Run")
    )
    queue = runs.Queue(out, LATER)
    assert queue.claim() == first
    assert runs.train(first, queue, str(tokens)) == whole
    steps = [json.loads(line) for line in (queue.folder(first) / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps if "loss" in one] == [1, 2, 3, 4]


@pytest.mark.usefixtures("usual_order")
def test_records_from_elsewhere_count_as_runs_that_are_made(tmp_path: Path) -> None:
    queue, (first, second, *_) = runs.Queue(tmp_path, LATER), plan.tuning_runs()
    finish(queue, first, 3.1)  # unpacked, without the claim
    assert queue.claim() == second


def test_runs_in_the_recorded_list_count_as_made(tmp_path: Path) -> None:
    made = runs.recorded_losses(ROOT / "results" / "arena" / "runs.json")
    queue = runs.Queue(tmp_path, LATER, made=made)
    recorded = plan.Run("none", 31, "mini", "wikipedia")
    assert queue.is_done(recorded)
    assert queue.loss(recorded) == made[recorded.name]
    claimed = {run.name for run in iter(queue.claim, None)}
    assert claimed.isdisjoint(made)
    assert claimed | made.keys() >= {run.name for run in queue.planned()}


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
        shared = {"learning_rate": made.learning_rate, "refinement": made.refinement, "seed": made.seed}
        return small_recipe(**shared, family="modernbert", health_texts=0, steps=4, corpus=str(text))

    monkeypatch.setattr(plan.Run, "recipe", property(small))
    monkeypatch.setattr(plan, "TUNING", {"slow": {"learning_rate": 1e-4}, "fast": {"learning_rate": 1e-2}})
    monkeypatch.setattr(plan, "FIRST", ())
    monkeypatch.setattr(plan, "TUNING_SEEDS", (42,))
    monkeypatch.setattr(plan, "PAIR_SEEDS", (31,))
    monkeypatch.setattr(plan, "MEDIUM_SEEDS", ())
    monkeypatch.setattr(plan, "OTHERS", {"books": {}})
    monkeypatch.setattr(plan, "RIVALS", ("gate", "sinkhorn-3"))
    monkeypatch.setattr(plan, "RIVAL_SEEDS", (31,))
    return tokens, tmp_path / "out"


def test_the_whole_queue_in_miniature(miniature: tuple[Path, Path], tmp_path: Path) -> None:
    tokens, out = miniature
    for name in ("runs", "claims"):
        (out / name).mkdir(parents=True)
    runs.work(runs.Queue(out, LATER), str(tokens))
    lines = (out / "log.txt").read_text().splitlines()
    assert len(lines) == sum(", loss " in line for line in lines) == 8
    names = [f"modernbert-{one}-{form}-31" for one in ("small-fast", "mini-books") for form in FORMS]
    names += [f"modernbert-mini-{form}-31" for form in ("gate", "sinkhorn-3")]
    assert all((out / "runs" / name / "model").is_dir() for name in names)
    runs.pack(out, tmp_path / "records.tar.xz")
    with tarfile.open(tmp_path / "records.tar.xz") as archive:
        archive.extractall(tmp_path / "back", filter="data")
    back = tmp_path / "back"
    assert not list(back.rglob("model"))
    assert (back / "log.txt").exists()
    done = CliRunner().invoke(
        app, ["arena", str(back / "runs"), "--out", str(tmp_path / "results"), "--fresh", "31"]
    )
    assert done.exit_code == 0, done.output
    assert "fresh seeds 31" in (tmp_path / "results" / "arena" / "README.md").read_text()

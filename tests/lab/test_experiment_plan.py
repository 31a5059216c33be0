"""Experiments, their runs, names and order; work that processes share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saobp.lab import EXPERIMENTS, choose_experiments, get_scale, session
from saobp.lab.experiment_plan import FAMILIES, ExperimentPlan
from saobp.lab.methods import METHODS, method_name
from saobp.lab.pages import PAGES
from saobp.lab.paper import TABLES, paper_table, paper_values
from saobp.lab.session import LabFolders, Session
from saobp.lab.work_queue import WorkItem, claimed, work_through
from saobp.refinement import Refinement
from saobp.sizes import FAMILY_NAMES
from saobp.training.progress import once

MINI = get_scale("mini")


def test_every_experiment_has_a_page_and_known_methods() -> None:
    assert set(PAGES) == set(EXPERIMENTS)
    for experiment in EXPERIMENTS.values():
        trained = *experiment.bert, *experiment.gpt2, *experiment.modernbert, *experiment.llama
        assert set(trained) <= set(METHODS)


def test_runs_are_named_after_their_recipe() -> None:
    plan = ExperimentPlan(choose_experiments("all"), MINI)
    names = {model.name for model in plan.pretrain_runs()}
    assert "bert-mini-high-0.2-seed42" in names
    assert "bert-mini-high-learned-seed4" in names
    assert "bert-mini-high-0.2-steps2-seed1" in names
    assert "gpt2-mini-high-0.2-future-paper-seed42" in names
    assert "bert-mini-entropy-seed2" in names
    assert "bert-mini-original-on-gutenberg_books-seed42" in names
    assert method_name(Refinement("none"), None) == "original"


def test_experiments_share_runs_and_names_tell_recipes_apart() -> None:
    plan = ExperimentPlan(choose_experiments("all"), MINI)
    models = plan.pretrain_runs()
    asked = sum(len(plan.models_of(one)) for one in plan.experiments)
    assert len(models) < asked / 2
    assert len({model.name for model in models}) == len({model.recipe for model in models}) == len(models)


def test_the_strength_follows_the_size() -> None:
    for size, strength in {"mini": 0.2, "small": 0.08, "medium": 0.05}.items():
        recipe = get_scale(size).recipe_of("bert", "high", 42)
        assert recipe.refinement is not None
        assert recipe.refinement.strength == strength


def test_the_scales_as_printed_have_runs_and_pages_of_their_own() -> None:
    for size, steps in {"mini": 60_000, "small": 150_000, "medium": 245_000}.items():
        scale = get_scale(size, "paper", 64)
        recipe = scale.recipe_of("bert", "high", 1)
        assert (scale.name, recipe.steps, recipe.batch_size) == (f"{size}-paper-64", steps, 64)
        assert recipe.schedule == "cosine"
        assert get_scale(f"{size}-paper") == get_scale(size, "paper") == get_scale(size, "paper", 32)
    printed = ExperimentPlan(choose_experiments("glue"), get_scale("mini", "paper"))
    names = {model.name for model in printed.pretrain_runs()}
    assert "bert-mini-paper-32-high-0.2-seed42" in names
    assert not names & {model.name for model in ExperimentPlan(printed.experiments, MINI).pretrain_runs()}


@pytest.mark.parametrize(
    ("scale", "recipe", "batch", "message"),
    [
        ("smoke", "paper", None, "the paper has no size 'smoke': choose one of mini, small, medium"),
        ("mini", "paper", 48, "with --recipe paper choose one of 32, 64, 128, 256"),
        ("mini", "fast", 64, "with --recipe paper choose one of"),
        ("mini", "slow", None, "the lab has no recipe 'slow': choose fast or paper"),
    ],
)
def test_settings_that_the_paper_has_not_are_refused(
    scale: str, recipe: str, batch: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        get_scale(scale, recipe, batch)


def test_the_mini_scale_has_a_budget_of_250_million_tokens_and_pairs_share_everything_else() -> None:
    plain, high = (MINI.recipe_of("bert", method, 42) for method in ("original", "high"))
    assert plain.tokens >= 250e6
    assert replace(high, refinement=None) == plain


def test_a_seed_of_all_methods_comes_before_the_next_seed() -> None:
    plan = ExperimentPlan(choose_experiments("pretraining,decoder-leak,learned"), MINI)
    names = [model.name for model in plan.pretrain_runs()]
    assert names[:3] == [f"bert-mini-{name}-seed42" for name in ("original", "high-0.2", "high-learned")]
    seeds = [int(name.rpartition("-seed")[2]) for name in names]
    assert seeds == sorted(seeds, key=(42, 1, 2, 3, 4).index)
    other = names.index("bert-mini-original-on-gutenberg_books-seed42")
    assert names.index("bert-mini-entropy-seed42") < other < names.index("bert-mini-original-seed1")
    tasks = [one.task for one in plan.finetune_runs() if one.model.seed == 42]
    assert len(dict.fromkeys(tasks)) == 12
    assert tasks == [task for task in dict.fromkeys(tasks) for _ in range(2)]


def test_only_and_seeds_select() -> None:
    plan = ExperimentPlan(choose_experiments("gtd,glue"), MINI, 2, "*-high-*")
    assert {model.name for model in plan.pretrain_runs()} == {f"bert-mini-high-0.2-seed{s}" for s in (42, 1)}
    assert all("high-0.2" in one.name for one in [*plan.finetune_runs(), *plan.measurements()])
    several = ExperimentPlan(choose_experiments("gtd"), MINI, 1, "*-low-*, *-original-*")
    assert [one.name for one in several.pretrain_runs()] == [
        "bert-mini-low-0.2-seed42",
        "bert-mini-original-seed42",
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: choose_experiments("gtd,nothing"), "unknown target 'nothing'"),
        (lambda: get_scale("huge"), "unknown scale 'huge'"),
        (
            lambda: ExperimentPlan(choose_experiments("gtd"), MINI, 99).pretrain_runs(),
            "1 to 12 seeds, not 99",
        ),
        (lambda: paper_table("none"), "the paper has no table 'none'"),
    ],
)
def test_bad_input_gets_a_sentence(call, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        call()


def test_items_are_done_once_in_order_and_failures_leave_the_others_going(tmp_path: Path) -> None:
    done: list[str] = []
    said: list[str] = []
    begun: list[str] = []

    def item(name: str, missing: str = "") -> WorkItem:
        def run() -> None:
            if name == "bad":
                raise KeyError("no luck")
            done.append(name)

        return WorkItem(name, lambda: name in done, run, lambda: missing)

    items = [item("first"), item("bad"), item("taken"), item("without", missing="a model"), item("last")]
    with claimed(tmp_path, "taken") as is_mine:
        assert is_mine
        result = work_through(items, tmp_path, said.append, begun.append)
    assert begun == ["[1/5] first", "[2/5] bad", "[5/5] last"]
    assert [one.split("\n")[0] for one in said] == [
        "bad failed: 'no luck'",
        "Traceback (most recent call last):",
    ]
    assert done == ["first", "last"]
    assert result.elsewhere == ["taken"]
    assert (result.failed, result.waiting) == ({"bad": "'no luck'"}, {"without": "a model"})
    again = work_through(items, tmp_path, lambda _: None)
    assert (again.done, again.reused) == (["taken"], ["first", "last"])


def test_workers_repeat_no_warning_and_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent says once what several workers warn of; which items they did stays in their logs."""

    def fake_jobs(commands: dict[str, list[str]], _: int, logs: Path, **rest: Any) -> dict[str, int]:
        logs.mkdir()
        for name in commands:
            words = f"Note: it leaks\n- [1/2] item of {name}\nmeasure: 1 done by {name}\n"
            (logs / f"{name}.log").write_text(words)
        rest["each_minute"]()
        return dict.fromkeys(commands, 0)

    monkeypatch.setattr(session, "run_jobs", fake_jobs)
    plan = ExperimentPlan(choose_experiments("sparsity"), get_scale("smoke"), 1)
    folders = LabFolders(tmp_path, tmp_path / "tokens", tmp_path / "results", tmp_path, is_synthetic=False)
    said: list[str] = []
    progress: list[str] = []
    Session(plan, folders, once(said.append), progress.append).run("pretrain", jobs=2)
    assert said[1:] == [
        "Note: it leaks",
        "measure: 1 done by pretrain-1",
        "measure: 1 done by pretrain-2",
        "pretrain: 2 left to do",
    ]
    assert progress == ["pretrain: 2 left to do"]


def test_the_paper_s_tables_are_there() -> None:
    assert all(paper_table(name) for name in TABLES)
    assert paper_values("gtd_race_middle", "gtd", "mini") == {
        "original": 0.75, "high": 0.78, "low": 0.78, "elemmul": 0.77
    }  # fmt: skip
    assert paper_values("tasks", "squad", "tiny") == {}


def test_patterns_decide_what_is_done_first() -> None:
    plan = ExperimentPlan(
        choose_experiments("gtd"), get_scale("mini"), 2, "*-low-*seed1*,*-high-*,*-original-seed42*"
    )
    names = [model.name.removeprefix("bert-mini-") for model in plan.pretrain_runs()]
    assert names == ["low-0.2-seed1", "high-0.2-seed42", "high-0.2-seed1", "original-seed42"]
    assert [one.model.name.removeprefix("bert-mini-") for one in plan.finetune_runs()] == names
    assert [one.model.name.removeprefix("bert-mini-") for one in plan.measurements()] == names


def test_reproduce_plans_the_arena_on_the_recipe_modern() -> None:
    plan = ExperimentPlan(choose_experiments("arena"), get_scale("mini"))
    runs = {run.name: run.recipe for run in plan.pretrain_runs()}
    assert len(runs) == 8 * (22 + 18)
    assert {recipe.name for recipe in runs.values()} == {"modern"}
    assert "llama-mini-high-key-bias-learned-seed7" in runs
    assert "modernbert-mini-high-learned+gate-seed42" in runs
    assert "arena" not in {experiment.name for experiment in choose_experiments("all")}


def test_every_family_that_is_trained_has_a_name() -> None:
    assert set(FAMILY_NAMES) == set(FAMILIES)

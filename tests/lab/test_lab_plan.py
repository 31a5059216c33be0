"""Experiments, their runs, names, order, shares and estimates."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saobp.lab import EXPERIMENTS, choose_experiments, get_scale
from saobp.lab.clock import Deadline, TimeIsUpError
from saobp.lab.estimates import Estimates
from saobp.lab.methods import METHODS, method_name
from saobp.lab.pages import PAGES
from saobp.lab.paper import TABLES, paper_table, paper_values
from saobp.lab.plan import Plan
from saobp.lab.sharing import share_of
from saobp.refinement import Refinement

MINI = get_scale("mini")


def test_every_experiment_has_a_page_and_known_methods() -> None:
    assert set(PAGES) == set(EXPERIMENTS)
    for experiment in EXPERIMENTS.values():
        assert {*experiment.bert, *experiment.gpt2} <= set(METHODS)


def test_runs_are_named_after_their_recipe() -> None:
    plan = Plan(choose_experiments("all"), MINI)
    names = {model.name for model in plan.trained()}
    assert "bert-mini-high-0.2-seed42" in names
    assert "bert-mini-high-learned-seed4" in names
    assert "bert-mini-high-0.2-steps2-seed1" in names
    assert "gpt2-mini-high-0.2-future-paper-seed42" in names
    assert "bert-mini-entropy-seed2" in names
    assert "bert-mini-original-on-gutenberg_books-seed42" in names
    assert method_name(Refinement("none"), None) == "original"


def test_experiments_share_runs_and_names_tell_recipes_apart() -> None:
    plan = Plan(choose_experiments("all"), MINI)
    models = plan.trained()
    asked = sum(len(plan.models_of(one)) for one in plan.experiments)
    assert len(models) < asked / 2
    assert len({model.name for model in models}) == len({model.recipe for model in models}) == len(models)


def test_the_strength_follows_the_size() -> None:
    for size, strength in {"mini": 0.2, "small": 0.08, "medium": 0.05}.items():
        recipe = get_scale(size).recipe_of("bert", "high", 42)
        assert recipe.refinement is not None
        assert recipe.refinement.strength == strength


def test_the_mini_scale_has_a_budget_of_250_million_tokens_and_pairs_share_everything_else() -> None:
    plain, high = (MINI.recipe_of("bert", method, 42) for method in ("original", "high"))
    assert plain.tokens >= 250e6
    assert replace(high, refinement=None) == plain


def test_the_most_informative_runs_come_first() -> None:
    names = [model.name for model in Plan(choose_experiments("pretraining"), MINI, 3).trained()]
    assert names[:3] == [f"bert-mini-{name}-seed42" for name in ("original", "high-0.2", "high-learned")]
    assert names.index("bert-mini-original-seed1") < names.index("bert-mini-entropy-seed42")
    assert names.index("bert-mini-low-0.2-seed42") < names.index("bert-mini-low-0.2-seed1")


def test_only_and_seeds_select() -> None:
    plan = Plan(choose_experiments("gtd,glue"), MINI, 2, "*-high-*")
    assert {model.name for model in plan.trained()} == {f"bert-mini-high-0.2-seed{s}" for s in (42, 1)}
    assert all("high-0.2" in one.name for one in [*plan.tuned(), *plan.measured()])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: choose_experiments("gtd,nothing"), "unknown target 'nothing'"),
        (lambda: get_scale("huge"), "unknown scale 'huge'"),
        (lambda: Plan(choose_experiments("gtd"), MINI, 9).trained(), "1 to 5 seeds, not 9"),
        (lambda: Deadline(0), "minutes must be above 0"),
        (lambda: paper_table("none"), "the paper has no table 'none'"),
    ],
)
def test_bad_input_gets_a_sentence(call, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        call()


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 5))
def test_shares_are_all_of_the_work_once_and_balanced(work: list[int], parts: int) -> None:
    numbered = list(enumerate(work))
    shares = [share_of(numbered, part + 1, parts, lambda one: one[1]) for part in range(parts)]
    assert sorted(one for share in shares for one in share) == numbered
    loads = [sum(weight for _, weight in share) for share in shares]
    assert max(loads) - min(loads) <= max(work, default=0)


def test_estimates_guess_before_and_know_after(tmp_path: Path) -> None:
    """A run of the same kind counts as it was, another by its cost."""
    from saobp.testing.runs import make_run, write_json
    from saobp.training.runs import environment

    plain, high = (Plan([], MINI).model("bert", method, 42) for method in ("original", "high"))
    guess = Estimates(tmp_path).seconds(plain)
    assert guess > 0
    folder = make_run(tmp_path / plain.name)
    write_json(folder / "recipe.json", {"kind": "pretrain", **plain.recipe.to_dict()})
    record = {"seconds": 1000.0, "environment": environment()}
    write_json(folder / "record.json", record)
    assert Estimates(tmp_path).seconds(plain) == pytest.approx(1055.0)
    assert 1000 < Estimates(tmp_path).seconds(high) < 1200
    write_json(folder / "record.json", {**record, "environment": {"hardware": "another"}})
    assert Estimates(tmp_path).seconds(plain) == guess


def test_a_deadline_stops_what_outruns_it() -> None:
    deadline = Deadline(0.05 / 60)
    assert not deadline.allows(1.0)
    with pytest.raises(TimeIsUpError), deadline.enforced():
        time.sleep(5)
    assert Deadline().allows(1e9)


def test_the_paper_s_tables_are_there() -> None:
    assert all(paper_table(name) for name in TABLES)
    assert paper_values("gtd_race_middle", "gtd", "mini") == {
        "original": 0.75, "high": 0.78, "low": 0.78, "elemmul": 0.77
    }  # fmt: skip
    assert paper_values("tasks", "squad", "tiny") == {}

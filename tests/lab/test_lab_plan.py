"""Experiments, their runs, names, order, shares and estimates."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from saobp.lab import EXPERIMENTS, choose_experiments, get_scale
from saobp.lab.clock import Deadline, TimeIsUpError
from saobp.lab.estimates import Estimates
from saobp.lab.methods import METHODS, method_name
from saobp.lab.pages import PAGES
from saobp.lab.paper import TABLES, paper_table, paper_values
from saobp.lab.plan import Measured, Plan, Tuned
from saobp.lab.work_queue import Piece, claimed, work_through
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


def test_a_seed_of_all_methods_comes_before_the_next_seed() -> None:
    plan = Plan(choose_experiments("pretraining,decoder-leak,learned"), MINI)
    names = [model.name for model in plan.trained()]
    assert names[:3] == [f"bert-mini-{name}-seed42" for name in ("original", "high-0.2", "high-learned")]
    seeds = [int(name.rpartition("-seed")[2]) for name in names]
    assert seeds == sorted(seeds, key=(42, 1, 2, 3, 4).index)
    other = names.index("bert-mini-original-on-gutenberg_books-seed42")
    assert names.index("bert-mini-entropy-seed42") < other < names.index("bert-mini-original-seed1")
    tasks = [one.task for one in plan.tuned() if one.model.seed == 42]
    assert len(dict.fromkeys(tasks)) == 12
    assert tasks == [task for task in dict.fromkeys(tasks) for _ in range(2)]


def test_only_and_seeds_select() -> None:
    plan = Plan(choose_experiments("gtd,glue"), MINI, 2, "*-high-*")
    assert {model.name for model in plan.trained()} == {f"bert-mini-high-0.2-seed{s}" for s in (42, 1)}
    assert all("high-0.2" in one.name for one in [*plan.tuned(), *plan.measured()])
    several = Plan(choose_experiments("gtd"), MINI, 1, "*-low-*, *-original-*")
    assert [one.name for one in several.trained()] == [
        "bert-mini-low-0.2-seed42",
        "bert-mini-original-seed42",
    ]


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


def test_pieces_are_done_once_in_order_and_failures_leave_the_others_going(tmp_path: Path) -> None:
    done: list[str] = []

    def piece(name: str, seconds: float = 0.0, lacks: str = "", can_continue: bool = False) -> Piece:
        def do() -> None:
            if name == "bad":
                raise KeyError("no luck")
            done.append(name)

        return Piece(name, lambda: name in done, do, lambda: seconds, lambda: lacks, can_continue)

    pieces = [
        piece("long", 1e4),
        piece("longer", 1e5, can_continue=True),
        piece("bad"),
        piece("taken"),
        piece("without", lacks="a model"),
        piece("short", 5.0),
    ]
    with claimed(tmp_path, "taken") as mine:
        assert mine
        result = work_through(pieces, tmp_path, Deadline(10), lambda _: None)
    assert done == ["short", "longer"]
    assert (result.elsewhere, result.left) == (["taken"], ["long"])
    assert (result.failed, result.lacking) == ({"bad": "'no luck'"}, {"without": "a model"})
    again = work_through(pieces, tmp_path, Deadline(0.5), lambda _: None)
    assert (again.done, again.reused) == (["taken"], ["longer", "short"])


def test_estimates_guess_before_and_know_after(tmp_path: Path) -> None:
    """A run of the same kind counts as it was, another by its cost."""
    from saobp.runs.provenance import environment
    from saobp.storage.atomic import unfinished
    from saobp.testing.fake_runs import make_run, write_json

    plain, high = (Plan([], MINI).model("bert", method, 42) for method in ("original", "high"))
    guess = Estimates(tmp_path).pretraining(plain)
    assert guess > 0
    folder = make_run(tmp_path / plain.name)
    write_json(folder / "recipe.json", {"kind": "pretrain", **plain.recipe.to_dict()})
    record = {"seconds": 1000.0, "environment": environment()}
    write_json(folder / "record.json", record)
    assert Estimates(tmp_path).pretraining(plain) == pytest.approx(1052.0)
    assert 1000 < Estimates(tmp_path).pretraining(high) < 1200
    assert Estimates(tmp_path, jobs=2).pretraining(plain) > 1100
    crowded = {**record, "environment": {**environment(), "jobs": 2}}
    write_json(folder / "record.json", crowded)
    assert Estimates(tmp_path, jobs=2).pretraining(plain) == pytest.approx(1050.0, rel=0.01)
    write_json(folder / "record.json", {**record, "environment": {"hardware": "another"}})
    assert Estimates(tmp_path).pretraining(plain) == guess
    tuned, measured = Tuned(plain, "cola"), Measured(plain, "maps")
    measured.file(tmp_path).parent.mkdir(parents=True)
    write_json(measured.file(tmp_path), {**record, "seconds": 7.0})
    unfinished(measured.file(tmp_path)).write_text("{")  # by another process
    estimates = Estimates(tmp_path)
    assert estimates.later(measured) == pytest.approx(7.35)
    estimates.learn(tuned, 10.0)
    assert estimates.later(tuned) == pytest.approx(10.5)


def test_a_deadline_counts_from_the_beginning_of_the_command() -> None:
    late = Deadline(2, time.time() - 119)
    assert 0 < late.left <= 1
    assert late.is_near
    assert not Deadline(2).is_near


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


def test_patterns_decide_what_is_done_first() -> None:
    plan = Plan(choose_experiments("gtd"), get_scale("mini"), 2, "*-low-*seed1*,*-high-*,*-original-seed42*")
    names = [model.name.removeprefix("bert-mini-") for model in plan.trained()]
    assert names == ["low-0.2-seed1", "high-0.2-seed42", "high-0.2-seed1", "original-seed42"]
    assert [one.model.name.removeprefix("bert-mini-") for one in plan.tuned()] == names
    assert [one.model.name.removeprefix("bert-mini-") for one in plan.measured()] == names

"""The plan of the arena: recorded recipes, and the order and choices that it fixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned_runs import AS_BEFORE, FORMS, LATER, MUON_TIMES, RECORDS, RUNS, losses_with, plan, runs, times_of
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab.arena_records import method_of, settings_of
from saobp.refinement import Refinement
from saobp.testing.scripts import ROOT

ENDS = ("learned-31", "longer-51", "0.001-51", "later-42", "faster-42", "learned-message-gate-42")


def test_the_plan_names_settings_methods_and_seeds() -> None:
    seven = (ROOT / "results" / "arena" / "plan.md").read_text().split("# Round seven")[1]
    for setting in plan.SETTINGS:
        assert f"`{setting}`" in seven
    for rate in plan.SMALL_RATES:
        assert f"{1000 * rate:g}e-3" in seven
    for form in (*plan.COMPARED[1:], *plan.BESIDE_QK_NORM, *plan.RIVALS):
        assert f"`{form}`" in seven
        assert str(Refinement.of(form)) == form
    for form in plan.AT_EQUAL_TIME:
        assert f"`{form}` less Original trained for longer" in seven
    for form, trained in plan.LEARNED_FORMS:
        assert f"`{form}`" in seven
        assert not trained or trained in plan.TRAINED
    for weights in plan.PENALTIES.values():
        assert ", ".join(f"{float(one.rpartition('=')[2]):g}" for one in weights) in seven
    for seeds in (plan.MANY_SEEDS, plan.PAIR_SEEDS, plan.RIVAL_SEEDS, plan.CONFIRMING_SEEDS):
        assert f"{seeds[0]} to {seeds[-1]}" in seven


def test_runs_come_in_the_order_of_the_plan_and_the_comparison_has_seeds_of_its_own() -> None:
    names = list(RUNS)
    assert names[0] == "modernbert-mini-masked-30-to-15-original-42"
    assert names[3] == "modernbert-mini-muon-falling-128-rows-original-42"
    compared, beside, rest = names[15:55], names[55:71], names[71:]
    assert compared[1::5] == [f"modernbert-mini-muon-falling-learned-{seed}" for seed in range(51, 59)]
    assert compared[3:5] == [f"modernbert-mini-muon-falling-original-{n}-percent-longer-51" for n in (2, 4)]
    forms = ("qk-norm", "learned-qk-norm")
    assert beside == [f"modernbert-mini-muon-falling-{form}-{n}" for n in range(51, 59) for form in forms]
    tuned_on = set(plan.SETTING_SEEDS) | set(plan.RATE_SEEDS)
    assert not {RUNS[name].seed for name in (*compared, *beside)} & tuned_on
    assert rest[0] == "modernbert-small-muon-falling-rate-0.0028-original-42"
    assert rest[8:10] == [f"modernbert-small-muon-falling-rate-0.002-{form}-31" for form in FORMS]
    assert rest[18:20] == [f"modernbert-mini-muon-falling-books-{form}-31" for form in FORMS]
    assert rest[28] == "modernbert-medium-muon-falling-rate-0.0014-original-31"
    rivals, penalties, chosen, forms, confirmed = (
        rest[32:62],
        rest[62:68],
        rest[68:78],
        rest[78:99],
        rest[99:],
    )
    assert rivals == [
        f"modernbert-mini-muon-falling-{rival}-{seed}" for seed in range(51, 56) for rival in plan.RIVALS
    ]
    assert penalties[::5] == [
        "modernbert-mini-muon-falling-entropy-weight-0.0001-42",
        "modernbert-mini-muon-falling-eigen-weight-0.1-42",
    ]
    assert chosen[:2] == [
        "modernbert-mini-muon-falling-entropy-weight-0.001-51",
        "modernbert-mini-muon-falling-eigen-weight-0.01-51",
    ]
    assert [name.removeprefix("modernbert-mini-muon-falling-") for name in forms[::3]] == [
        *("learned-42", "learned-faster-42", "learned-alternating-42", "learned-steps-2-later-steps-42"),
        *("learned-by-distance-42", "learned-message-gate-42", "learned-later-42"),
    ]
    new = [f"modernbert-mini-muon-falling-{form}-61" for form in ("original", "learned", "learned-later")]
    assert confirmed[:3] == new
    assert len(confirmed) == 24


@pytest.mark.parametrize(
    ("ratios", "further"),
    [
        ({"learned": 0.999, "key_bias": 0.98}, []),
        ({"learned": 1.0, "key_bias": 1.0001}, [1]),
        ({"learned": 1.0312, "key_bias": 1.02}, [2, 4]),
        ({"learned": 1.02, "key_bias": 1.02}, [2]),
    ],
)
def test_plain_attention_gets_the_steps_that_fit_into_the_time_of_a_form(
    ratios: dict[str, float], further: list[int]
) -> None:
    assert plan.further_steps("muon-falling", times_of("muon-falling", **ratios)) == further
    longer = [run.longer for run in plan.compared_runs(51, "muon-falling", further) if run.longer]
    assert longer == further


def test_times_of_another_recipe_plan_no_runs_at_equal_time() -> None:
    for setting in ("muon-falling-128-rows", plan.RECORDED):
        assert plan.further_steps(setting, MUON_TIMES) == []
    assert plan.further_steps("muon-falling", None) == []
    runs.check_times(MUON_TIMES, "muon-falling")
    with pytest.raises(ValueError, match=r"time\.json has times of another recipe than the chosen setting"):
        runs.check_times(MUON_TIMES, plan.RECORDED)


def test_times_that_do_not_fit_the_choice_are_named_in_the_log(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER, made={run.name: 3.0 for run in plan.setting_runs()}, times=MUON_TIMES)
    runs.note_choice(queue, next(plan.setting_runs()))
    log = (tmp_path / "log.txt").read_text()
    assert f"chosen setting: {plan.RECORDED}" in log
    assert "time.json is of another recipe: runs at equal time wait for its times" in log


def test_what_waits_for_a_choice_is_not_planned_before_it() -> None:
    nothing = list(plan.planned_runs({}))
    assert nothing == list(plan.setting_runs())
    chosen = losses_with("muon-falling-half")
    without_rate = list(plan.planned_runs(chosen))
    assert {run.setting for run in without_rate[15:]} == {"muon-falling-half"}
    assert {(run.size, run.form) for run in without_rate if run.size != "mini"} == {("small", "none")}
    assert not plan.is_tuned({})
    assert not plan.is_tuned(chosen)
    assert plan.is_tuned(losses_with("muon-falling-half", 1e-3))


def test_the_best_form_is_confirmed_unless_it_is_the_usual_one() -> None:
    usual = losses_with("muon-falling", 1e-3)
    assert {run.form for run in plan.form_runs("muon-falling") if usual[run] == 3.0} > {plan.LEARNED}
    assert plan.chosen_form("muon-falling", usual) is None
    assert not [run for run in plan.planned_runs(usual) if run.seed in plan.CONFIRMING_SEEDS]
    faster = plan.chosen_form("muon-falling", losses_with("muon-falling", 1e-3, plan.FASTER))
    assert (faster.form, faster.trained) == (plan.LEARNED, plan.FASTER)
    missing = losses_with("muon-falling", 1e-3, plan.FASTER)
    del missing[next(run for run in missing if run.trained == plan.LATER)]
    assert plan.chosen_form("muon-falling", missing) is None
    assert plan.chosen_weights("muon-falling", losses_with("muon-falling")) == []


@pytest.mark.parametrize("form", [*plan.COMPARED, *plan.BESIDE_QK_NORM])
def test_at_the_recipe_of_before_runs_may_be_pooled_with_recorded_ones(form: str) -> None:
    """Of the same recipe but for the seed."""
    recipe = {"kind": "pretrain", **plan.Run(form, 51, plan.RECORDED).recipe.to_dict()}
    partners = [one for one in RECORDS if one["recipe"]["seed"] == 11 and method_of(one["recipe"]) == form]
    assert any(len(settings_of([one, {**one, "recipe": recipe}])) == 1 for one in partners)


def test_recorded_runs_of_the_first_setting_have_its_names_and_recipe() -> None:
    recorded = {one["run"]: one for one in RECORDS}
    for seed in plan.SETTING_SEEDS:
        run = plan.Run("none", seed, plan.RECORDED)
        recipe = {"kind": "pretrain", **run.recipe.to_dict()}
        assert len(settings_of([recorded[run.name], {**recorded[run.name], "recipe": recipe}])) == 1


@pytest.mark.parametrize("name", [*list(RUNS)[:27:3], *(name for name in RUNS if name.endswith(ENDS))])
def test_a_record_names_the_command_that_makes_the_run_again(name: str) -> None:
    done = CliRunner().invoke(app, [*RUNS[name].command[1:], "--dry-run"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == json.loads(json.dumps(RUNS[name].recipe.to_dict()))


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_as_many_tokens_and_numbers_per_head_learn_at_one_rate(name: str) -> None:
    recipe = RUNS[name].recipe
    assert recipe.tokens == 98_304_000 * (100 + RUNS[name].longer) // 100
    times = 4 if RUNS[name].trained == plan.FASTER else 1
    assert recipe.learning_rate * recipe.strength_rate == pytest.approx(0.01 * times)
    assert recipe.size == name.split("-")[1]


def test_settings_differ_from_the_recipe_in_what_they_name() -> None:
    def fields(setting: str, **options: Any) -> dict[str, Any]:
        return plan.Run("none", 31, setting, **options).recipe.to_dict()

    usual = fields(plan.RECORDED)
    for setting, changes in plan.SETTINGS.items():
        steps = changes.get("steps", 3000)
        intervals = {"evaluation_steps": steps, "checkpoint_steps": steps // 5}
        assert fields(setting) == {**usual, **changes, **intervals}
    assert fields("muon-falling", corpus=plan.BOOKS) == {**fields("muon-falling"), "corpus": plan.BOOKS}
    longer = fields("muon-falling-128-rows", longer=4)
    steps = {"steps": 6240, "log_steps": 12, "evaluation_steps": 6240, "checkpoint_steps": 1248}
    assert longer == {**fields("muon-falling-128-rows"), **steps}
    small = fields("muon-falling", size="small", rate=1e-3)
    assert small["learning_rate"] == 1e-3
    assert small["optimizer"] == "muon"
    medium = [run.recipe.learning_rate for run in AS_BEFORE.values() if run.size == "medium"]
    assert medium == pytest.approx([2e-3] * 4)  # that of the recipe modern, as small's


def test_what_has_the_lowest_mean_is_chosen_once_all_have_ended() -> None:
    equal = dict.fromkeys(plan.setting_runs(), 3.0)
    assert plan.chosen_setting(equal) == plan.RECORDED  # the first in the plan
    losses = losses_with("muon-falling-half")
    assert plan.chosen_setting(losses) == "muon-falling-half"
    losses[plan.Run("none", 9, "muon-falling-half")] = 3.5
    losses[plan.Run("none", 9, "muon-falling")] = 3.0
    assert plan.chosen_setting(losses) == "muon-falling"
    losses[plan.Run("none", 16, "muon-falling")] = None  # it failed
    losses[plan.Run("none", 42, "muon-falling-averaged")] = float("nan")
    losses[plan.Run("none", 42, "muon-falling-128-rows")] = 3.09
    assert plan.chosen_setting(losses) == "muon-falling-128-rows"
    del losses[plan.Run("none", 42, "muon-falling-averaged")]
    assert plan.chosen_setting(losses) is None
    losses = losses_with("muon-falling", 1.4e-3)
    assert plan.chosen_rate("muon-falling", losses) == 1.4e-3
    assert plan.chosen_rate("muon-falling-half", losses) is None

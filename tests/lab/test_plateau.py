"""The page of the plateau from planted logs: every batch, runs that stopped, runs that never left."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from saobp.lab import choose_experiments, get_scale
from saobp.lab.experiment_plan import ExperimentPlan, PretrainRun
from saobp.lab.pages import PAGES
from saobp.lab.plateau_figures import LoggedRun, differences, perplexities
from saobp.lab.tabulate import tabulate
from saobp.runs.folder import RunError
from saobp.testing.fake_runs import record, write_json

PLAN = ExperimentPlan(choose_experiments("plateau"), get_scale("mini", "paper"), 3)


def log(model: PretrainRun, runs: Path, *, leaves: int | None, last: int, stop: int | None = None) -> None:
    """A run whose perplexity falls from 450 after a step; finished if it is whole or stopped as planned."""
    folder = model.folder(runs)
    folder.mkdir(parents=True)
    write_json(
        folder / "recipe.json", {"kind": "pretrain", **replace(model.recipe, stop_after=stop).to_dict()}
    )
    write_json(folder / "record.json", record(model.seed, seconds=60.0))
    lines = []
    for step in range(1000, last + 1, 1000):
        perplexity = 9000.0 if step == 1000 else 450.0 if leaves is None or step < leaves else 100.0
        lines.append({"step": step, "eval_loss": 1.0, "eval_perplexity": perplexity})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if last == (stop or model.recipe.steps):
        write_json(folder / "result.json", {"steps": last, "eval_perplexity": lines[-1]["eval_perplexity"]})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Batch 32 never leaves; 64 does in two of three pairs; 128 was cut off; 256 stopped as planned."""
    folder = tmp_path / "runs"
    for model in PLAN.pretrain_runs():
        batch, late = model.recipe.batch_size, 2000 * (model.method.key == "high")
        if batch == 32:
            log(model, folder, leaves=None, last=60_000)
        elif batch == 64:
            log(model, folder, leaves=None if model.seed == 2 else 40_000 + late, last=60_000)
        elif batch == 128 and model.seed == 42:
            log(model, folder, leaves=21_000 + late, last=30_000)
        elif batch == 256:
            late *= 2 if model.seed == 42 else 3
            log(model, folder, leaves=11_000 + late, last=20_000, stop=20_000)
    return folder


def test_the_plan_has_every_batch_and_another_recipe_only_its_own() -> None:
    assert {model.recipe.batch_size for model in PLAN.pretrain_runs()} == {32, 64, 128, 256}
    assert len(PLAN.pretrain_runs()) == 4 * 2 * 3
    for scale, batch in ((get_scale("mini"), 256), (get_scale("mini", "paper", 64), 64)):
        one = ExperimentPlan(choose_experiments("plateau"), scale, 1)
        assert [model.recipe.batch_size for model in one.pretrain_runs()] == [batch] * 2


@pytest.mark.usefixtures("figures_unsaved")
def test_the_page_says_who_left_and_what_was_not_run(runs: Path, tmp_path: Path) -> None:
    tabulate(PLAN, runs, tmp_path / "results")
    folder = tmp_path / "results" / "plateau"
    page = (folder / "mini-paper.md").read_text()
    assert "| 32 x 128 tokens | Original, seed 42 | 60,000 | 246 | 450.0 | not |" in page
    assert (
        "| 64 x 128 tokens | High, seed 1 | 60,000 | 492 | 100.0 | step 42,000, 344 million tokens |" in page
    )
    assert "| 128 x 128 tokens | Original, seed 42 | 30,000 (stopped) | 492 | 100.0 | step 21,000" in page
    assert "| 256 x 128 tokens | High, seed 2 | 20,000 (stopped) |" in page
    assert "32 x 128 tokens: High's perplexity is +0.0 [+0.0, +0.0] from Original's, +0.00 % [" in page
    outcome = json.loads((folder / "mini-paper.json").read_text())
    claims = {claim["words"]: claim for claim in outcome["claims"]}
    left = "{} x 128 tokens: High leaves the plateau after fewer steps than Original"
    ends = "{} x 128 tokens: High ends at a lower perplexity than Original, per cent"
    assert left.format(32) not in claims, "nobody left"
    assert claims[left.format(64)]["detail"].endswith("(2 pairs)")
    assert claims[left.format(256)]["status"] == "does not reproduce", "High leaves later in three pairs"
    assert claims[ends.format(32)]["status"] == "not shown"
    assert ends.format(256) not in claims, "none of these runs was whole"
    assert [name for name in outcome["missing"] if "-128-" in name] == outcome["missing"]
    assert len(outcome["missing"]) == 4
    assert outcome["runs"] == 20


def test_a_damaged_log_is_named_and_an_error_of_the_page_is_none_of_a_log(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(PAGES, "plateau", lambda *_: {}["a slip of the page"])
        with pytest.raises(KeyError, match="a slip of the page"):
            tabulate(PLAN, runs, tmp_path / "results")
    model = PLAN.pretrain_runs()[0]
    log_file = model.folder(runs) / "metrics.jsonl"
    log_file.write_text(log_file.read_text() + '{"step": 61000, "eval_perplexity": null}\n')
    with pytest.raises(ValueError, match=f"measurement of {model.name} in .* expected form"):
        tabulate(PLAN, runs, tmp_path / "results")


def test_stopped_runs_count_for_curves_alone(runs: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, experiments=choose_experiments("pretraining"), scale=get_scale("mini", "paper", 256))
    with pytest.raises(RunError, match="differs in stop_after"):
        tabulate(plan, runs, tmp_path / "results")


def test_every_batch_has_a_column_over_steps_and_over_tokens() -> None:
    run = LoggedRun("original", 42, 4096, [(1000, 500.0), (2000, 450.0)], True)
    stopped = run._replace(method="high", is_whole=False)
    longer = run._replace(tokens_per_step=8192, points=[(1000, 500.0), (9000, 450.0)])
    figure = perplexities({"32": [run, stopped], "64": [longer]}, 245.0)
    assert len(figure.axes) == 4
    over_steps, _, over_tokens, _ = figure.axes
    assert list(over_steps.lines[0].get_xdata()) == [1.0, 2.0]
    assert list(over_tokens.lines[0].get_xdata()) == [4.096, 8.192]
    assert over_steps.get_xlim()[1] >= 9.0, "columns compare"
    assert len(over_steps.lines) == 2 + 1 + 1, "two runs, the cross of the one that stopped, the level"


def test_a_single_batch_has_one_panel_with_what_counting_gives() -> None:
    run = LoggedRun("original", 42, 4096, [(1000, 500.0), (2000, 450.0)], True)
    figure = perplexities({"32 x 128 tokens": [run]}, 245.0, {"counting": 612.0})
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.texts] == [
        "counting: 612",
        "below 245 a run has left the plateau",
    ]
    assert [list(line.get_ydata()) for line in axis.lines[1:]] == [[612.0] * 2, [245.0] * 2]


def test_differences_are_of_pairs_and_broken_where_evaluations_are_missing() -> None:
    steps = [*range(1000, 11_000, 1000), 20_000]
    base = LoggedRun("original", 42, 4096, [(step, 100.0) for step in steps], True)
    high = base._replace(method="high", points=[(step, 102.0) for step in steps])
    lone = high._replace(seed=1)
    figure = differences({"32 x 128 tokens": [base, high, lone], "64 x 128 tokens": [base]})
    assert figure is not None
    (axis,) = figure.axes
    _, line, end = axis.lines
    assert list(line.get_xdata()) == [*range(1, 11), 20, 20]
    drawn = list(line.get_ydata())
    assert drawn[:10] + drawn[11:] == pytest.approx([2.0] * 11)
    assert math.isnan(drawn[10])
    assert list(end.get_xdata()) == [20.0]
    assert [text.get_text() for text in axis.texts] == ["seed 42: +2.0 %"]
    assert differences({"32 x 128 tokens": [base, lone]}) is None

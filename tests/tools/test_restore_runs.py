"""Runs whose folders are gone come back from records, and no page is written over by a poorer one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from saobp.lab import choose_experiments, get_scale
from saobp.lab.experiment_plan import ExperimentPlan
from saobp.lab.results import RESTORED
from saobp.lab.session import LabFolders, Session
from saobp.lab.tabulate import tabulate
from saobp.runs.folder import RunError, RunFolder
from saobp.testing.fake_runs import make_run, record, write_json
from saobp.testing.scripts import load_script
from saobp.training.finetune.run import summarise

SCRIPT = load_script("tools/restore_runs.py")
restore = SCRIPT.restore

MINI = get_scale("mini")
pytestmark = pytest.mark.usefixtures("figures_unsaved")
PLAN = ExperimentPlan(choose_experiments("steps"), MINI, 3)
STEPS = {"original": 30.0, "high": 30.1, "two-steps": 31.0, "three-steps": 31.5}


def _plant(runs: Path, plan: ExperimentPlan, methods: tuple[str, ...] = tuple(STEPS)) -> None:
    for model in plan.pretrain_runs():
        if model.method.key in methods:
            run = make_run(model.folder(runs), seed=model.seed, layers=2, heads=3)
            write_json(run / "recipe.json", {"kind": "pretrain", **model.recipe.to_dict()})
            perplexity = STEPS.get(model.method.key, 30.0) + model.seed / 100
            write_json(
                run / "result.json",
                {"eval_perplexity": perplexity, "tokens": model.recipe.tokens, "strengths": None},
            )


def _tune(runs: Path, plan: ExperimentPlan) -> None:
    for one in plan.finetune_runs():
        results = {}
        for seed in one.seeds:
            score = 60.0 + seed
            metrics = {"matthews": score}
            results[seed] = {
                "task": one.task, "seed": seed, "metric": "matthews", "best": score, "last": score,
                "best_epoch": 1, "best_metrics": metrics, "last_metrics": metrics, "truncated": 0.0,
                "partial": False, "rows": {}, "official_rows": {}, "files": {}, "notes": [],
            }  # fmt: skip
            folder = one.folder(runs) / f"seed-{seed}"
            folder.mkdir(parents=True)
            write_json(folder / "result.json", results[seed])
            write_json(folder / "record.json", record(seed, seconds=5.0))
            write_json(folder / "recipe.json", {"kind": "finetune", "task": one.task})
        write_json(one.folder(runs) / "result.json", summarise(results))


@pytest.mark.parametrize("targets", [("steps", "glue"), ("one-model-many-seeds",)])
def test_a_page_of_restored_runs_is_the_same_page(targets: tuple[str, ...], tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    plan = ExperimentPlan(choose_experiments(",".join(targets)), MINI, 2)
    _plant(runs, plan, (*STEPS, "low", "elemmul"))
    _tune(runs, plan)
    tabulate(plan, runs, out)
    pages = {name: (out / name / "mini.md").read_text() for name in targets}
    shutil.rmtree(runs)
    made = restore(plan, runs, out)
    assert len(made) == len(plan.pretrain_runs()) + len(plan.finetune_runs())
    tabulate(plan, runs, out)
    assert {name: (out / name / "mini.md").read_text() for name in pages} == pages
    assert all(one[RESTORED] for one in json.loads((out / targets[0] / "mini-runs.json").read_text()))


def test_new_runs_join_restored_ones(tmp_path: Path) -> None:
    out = tmp_path / "results"
    _plant(tmp_path / "first", PLAN, ("original", "high", "two-steps"))
    tabulate(PLAN, tmp_path / "first", out)
    _plant(tmp_path / "second", PLAN, ("three-steps",))
    assert len(restore(PLAN, tmp_path / "second", out)) == 9
    tabulate(PLAN, tmp_path / "second", out)
    page = (out / "steps" / "mini.md").read_text()
    assert "| High, three steps: a lower perplexity than one step | no | +1.400" in page
    assert not json.loads((out / "steps" / "mini.json").read_text())["missing"]


def test_a_run_that_is_there_is_not_restored(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    _plant(runs, PLAN)
    tabulate(PLAN, runs, out)
    assert restore(PLAN, runs, out) == []
    assert RESTORED not in RunFolder(PLAN.pretrain_runs()[0].folder(runs)).record


def test_a_run_that_was_begun_is_left_alone(tmp_path: Path) -> None:
    runs, out, begun = tmp_path / "runs", tmp_path / "results", PLAN.pretrain_runs()[0]
    _plant(runs, PLAN)
    tabulate(PLAN, runs, out)
    RunFolder(begun.folder(runs)).file("result.json").unlink()
    assert restore(PLAN, runs, out) == []
    assert not RunFolder(begun.folder(runs)).is_finished


def test_a_record_of_another_budget_is_refused(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    _plant(runs, PLAN)
    tabulate(PLAN, runs, out)
    path = out / "steps" / "mini-runs.json"
    path.write_text(path.read_text().replace('"tokens": 262144000', '"tokens": 1000'))
    with pytest.raises(RunError, match="1,000 tokens and seed 42, the plan of 262,144,000"):
        restore(PLAN, tmp_path / "none", out)


def test_a_page_is_not_written_over_by_one_with_fewer_runs(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    _plant(runs, PLAN)
    tabulate(PLAN, runs, out)
    before = (out / "steps" / "mini.md").read_text()
    gone = PLAN.pretrain_runs()[-1]
    shutil.rmtree(gone.folder(runs))
    told: list[str] = []
    tabulate(PLAN, runs, out, told.append)
    assert (out / "steps" / "mini.md").read_text() == before
    assert told == [
        f"{out / 'steps' / 'mini.md'} stays as it is: of the 12 runs behind it, 1 are not in {runs}, "
        f"{gone.name} for one; rerun them, restore them with tools/restore_runs.py, or name another --out"
    ]


def test_a_page_that_draws_logs_is_not_written_over_without_them(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    plan = ExperimentPlan(choose_experiments("pretraining"), MINI, 1)
    _plant(runs, plan)
    tabulate(plan, runs, out)
    before = (out / "pretraining" / "mini.md").read_text()
    shutil.rmtree(runs)
    restore(plan, runs, out)
    told: list[str] = []
    tabulate(plan, runs, out, told.append)
    assert "draws logs of runs" in told[0]
    assert (out / "pretraining" / "mini.md").read_text() == before


def test_the_script_restores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    _plant(runs, PLAN)
    tabulate(PLAN, runs, out)
    assert SCRIPT.main(["steps", "--scale", "mini", f"--runs={tmp_path / 'none'}", f"--out={out}"]) == 0
    assert "restored 12 runs" in capsys.readouterr().out
    assert SCRIPT.main(["nothing", f"--out={out}"]) == 1
    assert "unknown target 'nothing'" in capsys.readouterr().err


def test_no_html_page_of_restored_runs(tmp_path: Path) -> None:
    """None of them has curves to look at."""
    runs, out = tmp_path / "runs", tmp_path / "results"
    _plant(tmp_path / "first", PLAN)
    tabulate(PLAN, tmp_path / "first", out)
    restore(PLAN, runs, out)
    said: list[str] = []
    Session(PLAN, LabFolders(runs, tmp_path / "tokens", out, None, is_synthetic=False), said.append).run(
        "tabulate"
    )
    assert any(line.startswith("wrote ") for line in said)
    assert not any("the page:" in line for line in said)

"""The scripts of the arena, the runs of their plan, and choices as if tuning had ended."""

from __future__ import annotations

import json
import time
from typing import Any

from saobp.lab.step_times import LATER as FIELDS
from saobp.lab.step_times import SHARED, StepTimes
from saobp.testing.scripts import ROOT, load_script

runs = load_script("benchmarks/arena_runs.py")
plan = runs.sys.modules["arena_plan"]
RECORDS: list[dict[str, Any]] = json.loads((ROOT / "results" / "arena" / "runs.json").read_text())
LATER = time.time() + 100_000
FORMS = ("original", "learned")


def losses_with(
    best_setting: str, best_rate: float | None = None, best_form: str = ""
) -> dict[Any, float | None]:
    """As if tuning had chosen these, of each penalty the middle weight, and how the best form was trained."""
    losses: dict[Any, float | None] = {
        run: 3.0 if run.setting == best_setting else 3.1 for run in plan.setting_runs()
    }
    if best_rate is not None:
        losses |= {run: 3.0 if run.rate == best_rate else 3.1 for run in plan.rate_runs(best_setting)}
        middle = [weights[1] for weights in plan.PENALTIES.values()]
        losses |= {run: 3.0 if run.penalty in middle else 3.1 for run in plan.penalty_runs(best_setting)}
        losses |= {run: 3.0 if run.trained == best_form else 3.1 for run in plan.form_runs(best_setting)}
    return losses


def times_of(setting: str, *, learned: float = 1.0, key_bias: float = 1.0) -> StepTimes:
    """As if steps with learned strengths, or a key bias, took so many times as long as Original's."""
    recipe = plan.Run("none", 51, setting).recipe.to_dict()
    ratios = {"none": 1.0, "high:learned": learned, "high-key-bias:learned": key_bias}
    seconds = {form: [ratio] * 3 for form, ratio in ratios.items()}
    return StepTimes("time.json", {name: recipe[name] for name in (*SHARED, *FIELDS)}, seconds, {})


MUON_TIMES = times_of("muon-falling", learned=1.031, key_bias=1.012)
RUNS = {run.name: run for run in plan.planned_runs(losses_with("muon-falling", 2e-3, plan.LATER), MUON_TIMES)}
AS_BEFORE = {run.name: run for run in plan.planned_runs(losses_with(plan.RECORDED, 2.8e-3))}


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

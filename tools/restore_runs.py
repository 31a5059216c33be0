"""Rebuild deleted folders of runs from the records in pages of results.

    python tools/restore_runs.py TARGETS --scale mini --runs runs/lab --out results

Scores, perplexities and strengths are restored, so that a page can be extended by later runs
(``saobp reproduce TARGETS --stage tabulate``); logs and measurements are not. Records are marked as restored.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saobp.lab import choose_experiments, get_scale
from saobp.lab.experiment_plan import ExperimentPlan, FinetuneRun, PretrainRun
from saobp.lab.results import RESTORED, recorded_runs
from saobp.runs.folder import RunError
from saobp.runs.layout import RECIPE, RECORD, RESULT, seed_folder
from saobp.storage.json_files import write_json
from saobp.training.finetune.run import summarise

PAGE_FIELDS = ("run", "kind", "result", "recipe")
"""Fields that a page adds to the record of a run."""


def restore(plan: ExperimentPlan, runs: Path, out: Path) -> list[str]:
    """Write folders for runs of the plan that exist only in pages in ``out``; returns their names.

    Runs that have a folder are skipped.
    """
    known = recorded_runs(out, plan.scale.name)
    restored = []
    for model in plan.pretrain_runs():
        if model.name in known and not model.folder(runs).exists():
            _restore_pretraining(model, known[model.name], runs)
            restored.append(model.name)
    for one in plan.finetune_runs():
        seeds = {seed: known[name] for seed in one.seeds if (name := one.record_name(seed)) in known}
        if len(seeds) == len(one.seeds) and not one.folder(runs).exists():
            _restore_finetuning(one, seeds, runs)
            restored.append(one.name)
    return restored


def _restore_pretraining(model: PretrainRun, known: dict[str, Any], runs: Path) -> None:
    result = known["result"]
    if (known["seed"], result["tokens"]) != (model.seed, model.recipe.tokens):
        raise RunError(
            f"the record of {model.name} is of {result['tokens']:,} tokens and seed {known['seed']}, "
            f"the plan of {model.recipe.tokens:,} and {model.seed}: name another --out"
        )
    _write(model.folder(runs), known, {"kind": "pretrain", **model.recipe.to_dict()})


def _restore_finetuning(one: FinetuneRun, seeds: dict[int, dict[str, Any]], runs: Path) -> None:
    for seed, known in seeds.items():
        _write(seed_folder(one.folder(runs), seed), known, {"kind": "finetune", "task": one.task})
    results = {seed: known["result"] for seed, known in seeds.items()}
    write_json(one.folder(runs) / RESULT, summarise(results))


def _write(folder: Path, known: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Write record, recipe and, last, the result, which marks a run as finished."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {name: value for name, value in known.items() if name not in PAGE_FIELDS}
    write_json(folder / RECORD, {**record, RESTORED: True})
    write_json(folder / RECIPE, known.get("recipe", recipe))
    write_json(folder / RESULT, known["result"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", help="as for saobp reproduce")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--runs", type=Path, default=Path("runs/lab"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    given = parser.parse_args(arguments)
    try:
        plan = ExperimentPlan(choose_experiments(given.targets), get_scale(given.scale), given.seeds)
        print(f"restored {len(restore(plan, given.runs, given.out))} runs")
    except (ValueError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

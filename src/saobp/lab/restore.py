"""Runs whose folders are gone, made anew from the records that pages of results keep of them.

Their scores, perplexities and strengths come back, so that a page can be extended by runs of another day.
What they logged and what was measured of them does not; ``RESTORED`` in a record says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saobp.lab.plan import Plan, Trained, Tuned
from saobp.runs.folder import RunError
from saobp.runs.json_files import read_json, write_json
from saobp.runs.layout import RECIPE, RECORD, RESULT, seed_folder
from saobp.training.finetune.run import summarise

RESTORED = "restored"
OUTSIDE = ("run", "kind", "result", "recipe")
"""What a page adds to the record of a run."""


def restore(plan: Plan, runs: Path, out: Path) -> list[str]:
    """Make folders for runs of the plan that only pages in ``out`` know of, and give their names.

    A run that was begun is left alone.
    """
    known = recorded_runs(out, plan.scale.name)
    made = []
    for model in plan.trained():
        if model.name in known and not model.folder(runs).exists():
            _restore_trained(model, known[model.name], runs)
            made.append(model.name)
    for tuned in plan.tuned():
        if tuned.name in known and not tuned.folder(runs).exists():
            _restore_tuned(tuned, known[tuned.name], runs)
            made.append(tuned.name)
    return made


def recorded_runs(out: Path, scale: str, target: str = "*") -> dict[str, dict[str, Any]]:
    """By name, the records behind the pages of a scale, or behind one of them."""
    records = (
        record for path in sorted(out.glob(f"{target}/{scale}-runs.json")) for record in read_json(path)
    )
    return {record["run"]: record for record in records}


def _restore_trained(model: Trained, known: dict[str, Any], runs: Path) -> None:
    recipe, result = model.recipe.to_dict(), known["result"]
    if (known["seed"], result["tokens"]) != (model.seed, model.recipe.tokens):
        raise RunError(
            f"the record of {model.name} is of {result['tokens']:,} tokens and seed {known['seed']}, "
            f"the plan of {model.recipe.tokens:,} and {model.seed}: name another --out"
        )
    _write(model.folder(runs), known, {"kind": "pretrain", **recipe})


def _restore_tuned(tuned: Tuned, known: dict[str, Any], runs: Path) -> None:
    result, seed = known["result"], known["seed"]
    _write(seed_folder(tuned.folder(runs), seed), known, {"kind": "finetune", "task": tuned.task})
    write_json(tuned.folder(runs) / RESULT, summarise({seed: result}))


def _write(folder: Path, known: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Record, recipe and, last, the result, which makes a run count as finished."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {name: value for name, value in known.items() if name not in OUTSIDE}
    write_json(folder / RECORD, {**record, RESTORED: True})
    write_json(folder / RECIPE, known.get("recipe", recipe))
    write_json(folder / RESULT, known["result"])

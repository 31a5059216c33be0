"""What a model card says about training and results, from the recipe, record and result of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from saobp.runs.layout import RECIPE, RECORD, RESULT
from saobp.storage.json_files import read_object

FIELDS = {
    "name": "recipe",
    "task": "task",
    "model": "fine-tuned from",
    "corpus": "texts",
    "steps": "steps",
    "epochs": "epochs",
    "batch_size": "rows of a step",
    "batch": "rows of a step",
    "length": "tokens of a row",
    "learning_rate": "learning rate",
    "rate": "learning rate",
    "optimizer": "optimiser",
    "precision": "precision",
    "regularizer": "regularizer",
}
"""Fields of a recipe that a card names, and how."""
SHARES = ("accuracy", "exact_match")
"""Metrics that are a share of right answers, in percent."""
NORMAL = 1.959964
"""Standard deviations on each side of a 95 % interval."""


class CardResult(NamedTuple):
    """A number of a model card. ``interval`` is its 95 % interval, None where it is not known."""

    name: str
    value: float
    interval: tuple[float, float] | None = None
    note: str = ""


def checked_results(results: Sequence[Any]) -> tuple[CardResult, ...]:
    """A caller's numbers for the card, each ``(name, value, (low, high) or None, note)``."""
    entries = results if isinstance(results, list | tuple) else [results]
    for entry in entries:
        if not _is_result(entry):
            raise ValueError(
                "results must be a list of entries such as ('accuracy', 81.2, (79.9, 82.4), "
                f"'1,000 held-out rows'), unlike {entry!r}"
            )
    return tuple(CardResult(*entry) for entry in entries)


def _is_result(entry: Any) -> bool:
    if not isinstance(entry, list | tuple) or not 2 <= len(entry) <= 4:
        return False
    _, value, interval, _ = CardResult(*entry)
    if not isinstance(value, Real):
        return False
    if interval is None:
        return True
    is_pair = isinstance(interval, list | tuple) and len(interval) == 2
    return is_pair and all(isinstance(end, Real) for end in interval) and interval[0] <= interval[1]


@dataclass(frozen=True)
class RunSummary:
    """How a model was trained, as rows of a table, what it reached, and all strengths if known."""

    training: Mapping[str, str] = field(default_factory=dict)
    results: tuple[CardResult, ...] = ()
    strengths: tuple[float, ...] = ()


def summarise_run_folder(folder: str | PathLike[str]) -> RunSummary:
    """Summary of a finished run; raises where the folder holds none."""
    path = Path(folder)
    missing = [name for name in (RECIPE, RECORD, RESULT) if not (path / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{str(path)!r} is not the folder of a finished run: it has no {missing[0]}")
    return summarise_run(*(read_object(path / name) for name in (RECIPE, RECORD, RESULT)))


def summarise_run(
    recipe: Mapping[str, Any], record: Mapping[str, Any], result: Mapping[str, Any]
) -> RunSummary:
    """Summary of a run from the contents of its files."""
    training = {
        words: str(recipe[name]) for name, words in FIELDS.items() if recipe.get(name) not in (None, "")
    }
    if result.get("tokens"):
        training["tokens seen"] = f"{result['tokens']:,}"
    training["seed"] = str(record.get("seed", recipe.get("seed", "not recorded")))
    machine = record.get("environment", {})
    versions = ("saobp", "torch", "transformers")
    training["with"] = ", ".join(f"{name} {machine[name]}" for name in versions if name in machine)
    training["on"] = str(machine.get("hardware", "not recorded"))
    training["command"] = f"`{record['command']}`" if record.get("command") else "not recorded"
    training["data (sha256)"] = ", ".join(
        f"{name} {sums[:12]}" for name, sums in record.get("data", {}).items()
    )
    strengths = tuple(value for layer in result.get("strengths") or () for value in layer)
    recorded = {name: words for name, words in training.items() if words}
    return RunSummary(recorded, (*_results(result),), strengths)


def _results(result: Mapping[str, Any]) -> list[CardResult]:
    one_seed = "one seed; the spread over seeds is not known"
    if "last_metrics" in result:
        rows = result.get("rows", {}).get("validation", 0)
        part = " of a sample" if result.get("partial") else ""
        return [
            CardResult(
                f"{result.get('task', '')} {name}".strip(),
                value,
                share_interval(value, rows) if name in SHARES and rows else None,
                f"last epoch, {rows:,} validation rows{part}, one seed",
            )
            for name, value in result["last_metrics"].items()
        ]
    known = (("held-out loss", "eval_loss"), ("held-out perplexity", "eval_perplexity"), ("loss", "loss"))
    return [
        CardResult(name, result[key], None, one_seed) for name, key in known if result.get(key) is not None
    ]


def share_interval(percent: float, rows: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share in percent, over the rows it was counted on."""
    share, weight = percent / 100, NORMAL**2 / rows
    middle = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)

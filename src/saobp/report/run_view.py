"""Run folders as the page shows them, with a sentence for each missing or unreadable part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from saobp.refinement import Refinement
from saobp.report.curves import Curve, joined, read_curves
from saobp.report.explorer import is_explorer
from saobp.report.snapshots import Snapshot, diagnosed, read_snapshot
from saobp.runs.layout import (
    DIAGNOSIS,
    EXPLORER,
    HEALTH,
    METRICS,
    RECIPE,
    RECORD,
    RESULT,
    SEED,
    run_folders,
    seed_folders,
)
from saobp.runs.tolerant_reader import Problems, flat, number, try_read_lines, try_read_object

CAUSAL_FAMILIES = {"bert": False, "modernbert": False, "gpt2": True, "llama": True}
Facts = list[tuple[str, Any]]


@dataclass(frozen=True)
class Run:
    """One run, or one subject of a diagnosis.

    curves:   by quantity, one series per seed
    facts, recipe, result: name and value, in display order
    problems: sentences on what is missing or cannot be read
    colours: of its curves in light and dark mode; by default those of its index on the page
    dash: index of its line style, to distinguish runs of the same colour
    """

    name: str
    kind: str
    curves: dict[str, list[Curve]] = field(default_factory=dict)
    health: list[Snapshot] = field(default_factory=list)
    facts: Facts = field(default_factory=list)
    recipe: Facts = field(default_factory=list)
    result: Facts = field(default_factory=list)
    problems: Problems = field(default_factory=list)
    explorer: dict[str, Any] | None = None
    colours: tuple[str, str] | None = None
    dash: int = 0

    @property
    def is_learned(self) -> bool:
        """Whether its strengths were trained, not given."""
        return dict(self.recipe).get("refinement.strength") == "learned"


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Every run of the given folders, under unique names."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {str(folder)!r} with a run")
    opened = [run_folder for folder in folders for run_folder in run_folders(folder)]
    runs = [run for folder in opened for run in _read_folder(folder)]
    return [replace(run, name=name) for run, name in zip(runs, _unique_names(runs, opened), strict=True)]


def refinement_words(refinement: Any) -> str:
    """A recorded refinement in its text form; unchanged if its factor is not registered here."""
    try:
        return str(Refinement.from_dict(refinement or {"factor": "none"}))
    except (TypeError, ValueError):
        return str(refinement)


def _read_folder(folder: Path) -> list[Run]:
    if (folder / DIAGNOSIS).is_file():
        return _read_diagnosis(folder)
    return [_read_run(folder)]


def _read_run(folder: Path) -> Run:
    problems: Problems = []
    seeds = seed_folders(folder)
    described = seeds[0] if seeds and not (folder / RECIPE).is_file() else folder
    recipe = try_read_object(described / RECIPE, problems, "what was trained is not known")
    record = try_read_object(described / RECORD, problems, "when, where and on which data is not known")
    if described != folder and record:
        record["seed"] = ", ".join(seed.name.removeprefix(SEED) for seed in seeds)
    result = try_read_object(folder / RESULT, problems)
    status = str(record.get("status", "unknown"))
    if not (folder / RESULT).is_file():
        problems.append(f"result.json is missing: the run has not finished (its status is {status}).")
    kind = str(recipe.get("kind", "run"))
    if seeds:
        parts = [_curves(seed, problems, seed.name.replace("-", " ", 1)) for seed in seeds]
        curves = joined(parts)
        health = _health(seeds[0], recipe, problems) if (seeds[0] / HEALTH).is_file() else []
    elif kind == "evaluate":
        curves, health = {}, []
    else:
        curves = _curves(folder, problems)
        health = _health(folder, recipe, problems)
    facts = _facts(recipe, record)
    if seeds and health:
        facts.append(("heads shown", f"of {seeds[0].name.replace('-', ' ', 1)}"))
    return Run(
        folder.resolve().name,
        kind,
        curves,
        health,
        facts,
        [(name, value) for name, value in flat(recipe) if name != "kind"],
        flat(result),
        problems,
        _explorer(folder, problems),
    )


def _curves(folder: Path, problems: Problems, of: str = "") -> dict[str, list[Curve]]:
    found: Problems = []
    lines = try_read_lines(
        folder / METRICS,
        found,
        "there are no curves",
        lambda entry: number(entry.get("step")) is not None,
    )
    curves = read_curves(lines, of)
    if "loss" not in curves and any("loss" in line for line in lines):
        found.append("no training loss in metrics.jsonl is a finite number.")
    problems += [f"{of}: {problem}" if of else problem for problem in found]
    return curves


def _health(folder: Path, recipe: dict[str, Any], problems: Problems) -> list[Snapshot]:
    length, family = number(recipe.get("length")), recipe.get("family")
    causal = CAUSAL_FAMILIES.get(family) if isinstance(family, str) else None
    snapshots: list[Snapshot] = []

    def keep(entry: dict[str, Any]) -> bool:
        snapshot = read_snapshot(entry, length, causal)
        if snapshot is not None:
            snapshots.append(snapshot)
        return snapshot is not None

    try_read_lines(folder / HEALTH, problems, "there is nothing to say about single heads", keep)
    return snapshots


def _facts(recipe: dict[str, Any], record: dict[str, Any]) -> Facts:
    facts: Facts = []
    if recipe:
        names = [str(recipe[name]) for name in ("family", "size") if recipe.get(name) is not None]
        model = " ".join(names) or "/".join(Path(str(recipe.get("model", ""))).parts[-2:])
        facts += [("model", model)] if model else []
        facts += [("task", recipe["task"])] if recipe.get("task") is not None else []
        facts.append(("refinement", refinement_words(recipe.get("refinement"))))
        if recipe.get("regularizer") is not None:
            facts.append(("regularizer", recipe["regularizer"]))
    for name in ("status", "seed", "started", "finished", "seconds"):
        if record.get(name) is not None:
            facts.append(
                (name, _date_text(record[name]) if name in ("started", "finished") else record[name])
            )
    environment = record.get("environment")
    if isinstance(environment, dict):
        facts += [(str(name), value) for name, value in environment.items() if value is not None]
    data = record.get("data")
    if isinstance(data, dict):
        facts += [(f"data: {name}", f"sha256 {str(sum_)[:16]}…") for name, sum_ in data.items()]
    for name in ("commit", "command"):
        if record.get(name) is not None:
            facts.append((name, record[name]))
    return facts


def _date_text(value: Any) -> Any:
    """ISO 8601 to ``2026-01-31 12:00:05 UTC``."""
    try:
        when = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return value
    zone = when.strftime(" %Z").rstrip()
    return f"{when:%Y-%m-%d %H:%M:%S}{zone}"


def _explorer(folder: Path, problems: Problems) -> dict[str, Any] | None:
    if not (folder / EXPLORER).is_file():
        return None
    data = try_read_object(folder / EXPLORER, problems)
    if data and not is_explorer(data):
        problems.append("explorer.json does not have the form of this version: there is nothing to explore.")
    return data if data and is_explorer(data) else None


def _read_diagnosis(folder: Path) -> list[Run]:
    problems: Problems = []
    try:
        records = json.loads((folder / DIAGNOSIS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        records = []
    good = [record for record in records if isinstance(record, dict)] if isinstance(records, list) else []
    explorer = _explorer(folder, problems)
    runs = []
    for record in good:
        snapshot = diagnosed(record)
        if snapshot is None:
            problems.append("a record of diagnosis.json cannot be read and is left out.")
            continue
        settings = record.get("settings")
        facts = [(name, record[name]) for name in ("texts", "tokens") if name in record]
        facts += [(name, value) for name, value in flat(settings) if value is not None]
        runs.append(Run(str(record.get("subject", "model")), "diagnosis", health=[snapshot], facts=facts))
    if not runs:
        problems.append("diagnosis.json cannot be read, so there is nothing to say about single heads.")
        runs = [Run(folder.resolve().name, "diagnosis")]
    runs[0] = replace(runs[0], problems=problems, explorer=explorer)
    return runs


def _unique_names(runs: Sequence[Run], folders: Sequence[Path]) -> list[str]:
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    if len(runs) == len(folders):
        names = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({index})" for index, run in enumerate(runs, 1)]

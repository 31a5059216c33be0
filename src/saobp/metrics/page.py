"""What a diagnosis leaves behind: JSON, CSV, figures, and one page that holds all of it."""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment

from saobp.metrics.diagnosis import Diagnosis
from saobp.metrics.figures import TITLES, heat_map, layer_curves, save
from saobp.metrics.verdict import Verdict

SAMPLE_CHARACTERS = 400


def write_report(diagnoses: Sequence[Diagnosis], folder: Path, sample: str) -> list[Path]:
    """Write everything into ``folder``; ``sample`` is the first text, shown on the page as text."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [_write_json(diagnoses, folder / "diagnosis.json"), _write_csv(diagnoses, folder / "heads.csv")]
    figures = []
    for statistic in diagnoses[0].statistics:
        path = save(heat_map(diagnoses, statistic), folder / f"{statistic}.png")
        figures.append((f"{TITLES[statistic]} by layer and head", path))
    curves = save(layer_curves(diagnoses), folder / "layers.png")
    figures.insert(1, ("By layer: mean of its heads, and their range", curves))
    written += [path for _, path in figures]
    page = folder / "report.html"
    page.write_text(_page(diagnoses, figures, sample), encoding="utf-8")
    return [*written, page]


def _page(diagnoses: Sequence[Diagnosis], figures: Sequence[tuple[str, Path]], sample: str) -> str:
    template = resources.files("saobp.metrics").joinpath("page.html").read_text(encoding="utf-8")
    cut = sample[:SAMPLE_CHARACTERS] + ("…" if len(sample) > SAMPLE_CHARACTERS else "")
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(template)
        .render(
            diagnoses=diagnoses,
            figures=[(title, base64.b64encode(path.read_bytes()).decode()) for title, path in figures],
            sample=cut,
            titles=TITLES,
            verdicts=get_args(Verdict),
        )
    )


def _write_json(diagnoses: Sequence[Diagnosis], path: Path) -> Path:
    records = [_without_nan(diagnosis.to_dict()) for diagnosis in diagnoses]
    path.write_text(json.dumps(records, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def _write_csv(diagnoses: Sequence[Diagnosis], path: Path) -> Path:
    rows = [{"subject": one.subject, **head.to_dict()} for one in diagnoses for head in one.heads]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: null says that there is no number."""
    if isinstance(value, dict):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

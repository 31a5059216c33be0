"""Output of a diagnosis: JSON, CSV, figures, and a page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saobp.extras import import_optional
from saobp.metrics.diagnosis.diagnose import Diagnosis
from saobp.metrics.diagnosis.head_names import TITLES
from saobp.report.explorer import write_explorer
from saobp.report.page import write_report
from saobp.runs.layout import DIAGNOSIS, EXPLORER
from saobp.storage.atomic import write_atomically
from saobp.storage.json_files import finite

SAMPLE_CHARACTERS = 400
PAGE = "report.html"


def write_diagnosis(
    diagnoses: Sequence[Diagnosis], folder: Path, explorer: dict[str, Any] | None = None
) -> list[Path]:
    """Write the numbers, and data for the explorer, into ``folder``; ``saobp report`` reads it like a run.

    Figures, page and explorer of an earlier diagnosis there are removed: they show other numbers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [_write_json(diagnoses, folder / DIAGNOSIS), _write_csv(diagnoses, folder / "heads.csv")]
    for name in (EXPLORER, PAGE, *(f"{figure}.png" for figure in (*TITLES, "layers"))):
        (folder / name).unlink(missing_ok=True)
    if explorer is not None:
        written.append(write_explorer(explorer, folder))
    return written


def write_diagnosis_figures(diagnoses: Sequence[Diagnosis], folder: Path) -> list[Path]:
    """A heat map of each statistic, and curves over layers, as PNG files. Needs matplotlib."""
    plots = import_optional("saobp.metrics.diagnosis.head_plots", "drawing heads")
    statistics = diagnoses[0].statistics
    maps = [
        plots.save(plots.heat_map(diagnoses, statistic), folder / f"{statistic}.png")
        for statistic in statistics
    ]
    return [*maps, plots.save(plots.layer_curves(diagnoses), folder / "layers.png")]


def write_diagnosis_page(diagnoses: Sequence[Diagnosis], folder: Path, sample: str) -> Path:
    """``report.html`` of a folder with a diagnosis; ``sample`` is the first text, shown as text."""
    cut = sample[:SAMPLE_CHARACTERS] + ("…" if len(sample) > SAMPLE_CHARACTERS else "")
    title = "Attention health: " + " beside ".join(diagnosis.subject for diagnosis in diagnoses)
    return write_report([folder], folder / PAGE, title=title, sample=cut)


def _write_json(diagnoses: Sequence[Diagnosis], path: Path) -> Path:
    records = [finite(diagnosis.to_dict()) for diagnosis in diagnoses]
    write_atomically(path, json.dumps(records, indent=1, allow_nan=False) + "\n")
    return path


def _write_csv(diagnoses: Sequence[Diagnosis], path: Path) -> Path:
    rows = [
        {"subject": diagnosis.subject, **head.to_dict()}
        for diagnosis in diagnoses
        for head in diagnosis.heads
    ]
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())
    return path

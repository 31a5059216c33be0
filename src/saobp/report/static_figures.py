"""Figures for papers and slides, from the same data as the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from saobp.metrics.diagnosis.head_names import COLOURS, TITLES
from saobp.metrics.diagnosis.head_plots import heat_map, layer_curves, panels, short_name
from saobp.report.run_view import Run, read_runs

FIRST = ("loss", "eval_loss", "eval_perplexity")
TEXT_STAYS_TEXT: dict[Any, Any] = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "saobp"}
"""Text as text in SVG, TrueType fonts in PDF, and reproducible files."""


def write_figures(folders: Sequence[Path], out: Path, form: str, *, overwrite: bool = True) -> list[Path]:
    """Curves, and heat maps and layers of the last measured health, as files of ``form`` in ``out``.

    Without ``overwrite``, a figure that is there already is an error, before any is written.
    """
    runs = read_runs(folders)
    figures: dict[str, Figure] = {}
    if drawn_curves(runs):
        figures["curves"] = training_curves(runs)
    measured = [run.health[-1].diagnosis(run.name) for run in runs if run.health]
    if measured:
        statistics = [set(diagnosis.statistics) for diagnosis in measured]
        shared = [name for name in measured[0].statistics if all(name in names for names in statistics)]
        for name in shared:
            if name in TITLES:
                figures[name] = heat_map(measured, name)
        figures["layers"] = layer_curves(measured)
    if not figures:
        raise ValueError(
            "there is nothing to draw: " + " ".join(problem for run in runs for problem in run.problems)
        )
    there = [path for path in (out / f"{name}.{form}" for name in figures) if path.exists()]
    if there and not overwrite:
        raise ValueError(
            f"{there[0]} is there: name another folder by --out, or add --overwrite to replace it"
        )
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(TEXT_STAYS_TEXT):
        for name, figure in figures.items():
            path = out / f"{name}.{form}"
            stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
            figure.savefig(path, dpi=200, metadata=stamp)
            written.append(path)
    return written


def drawn_curves(runs: Sequence[Run]) -> list[str]:
    """Losses and everything measured on held-out data; not learning rates and speeds."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    others = [name for name in names if name.startswith("eval_") and name not in FIRST]
    return [*(name for name in FIRST if name in names), *others]


def training_curves(runs: Sequence[Run]) -> Figure:
    """One panel per logged quantity, over steps; the seeds of a run share its colour."""
    names = drawn_curves(runs)
    figure, axes = panels(len(names), 2, (4.2, 2.9))
    for panel, name in zip(axes, names, strict=True):
        for index, run in enumerate(runs):
            for number, series in enumerate(run.curves.get(name, [])):
                values = [numpy.nan if value is None else value for value in series.values]
                panel.plot(
                    numpy.array(series.axes["step"], dtype=float),
                    values,
                    color=COLOURS[index % len(COLOURS)],
                    linewidth=1.3 if not series.of else 0.9,
                    marker="o" if len(values) <= 16 else None,
                    markersize=3,
                    label=short_name(run.name) if number == 0 else None,
                )
        title = "training loss" if name == "loss" else name.replace("eval_", "validation ", 1)
        panel.set_title(title.replace("_", " "), fontsize=9)
        panel.set_xlabel("step")
        if name.endswith("perplexity"):
            _logarithmic(panel)
    if len(runs) > 1:
        axes[0].legend(fontsize=7, frameon=False)
    return figure


def _logarithmic(panel: Axes) -> None:
    """Logarithmic axis for perplexities, as on the page, with plain tick labels."""
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())

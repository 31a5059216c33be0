"""Figures of the plateau: held-out perplexity over steps, and differences from Original of the same seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from saobp.lab.axes import logarithmic
from saobp.lab.figures import Points
from saobp.lab.method_style import STYLES
from saobp.lab.methods import METHODS

BASE = "original"
GAP = 3
"""Evaluations of a pair that are this many times farther apart than usual are not joined."""
LEAST_REACH = 0.5
"""Per cent that the scale of differences has at least on either side."""


class LoggedRun(NamedTuple):
    """The log of a run: perplexity at its steps, and whether it reached the end of its schedule."""

    method: str
    seed: int
    tokens_per_step: int
    points: Points
    is_whole: bool


def perplexities(
    panels_of: Mapping[str, Sequence[LoggedRun]], level: float, counted: Mapping[str, float] | None = None
) -> Figure:
    """A column per batch size, a line per run: perplexity over steps, and over tokens if there are several.

    A cross ends the line of a run that stopped before the end of its schedule.
    level: below it a run has left the plateau; dotted
    counted: perplexities that counting words gives, by what is counted; thin lines
    """
    columns = len(panels_of)
    units = (("thousand steps", 1e3), ("million tokens", 1e6))[: 2 if columns > 1 else 1]
    size = (3.1 * columns + 0.6, 5.4) if columns > 1 else (6.4, 3.7)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(units), columns, squeeze=False, sharex="row", sharey=True)
    marks = [(f"{name}: {value:.0f}", value, "-", -8) for name, value in (counted or {}).items()]
    marks.append((f"below {level:.0f} a run has left the plateau", level, ":", 3))
    for column, (title, runs) in enumerate(panels_of.items()):
        for index, (label, unit) in enumerate(units):
            axis = grid[index][column]
            for run in runs:
                per_step = run.tokens_per_step if index else 1
                points = [(step * per_step / unit, value) for step, value in run.points]
                colour = STYLES[run.method].colour
                axis.plot(*zip(*points, strict=True), color=colour, lw=1.6, ls=_dash(run.method))
                if not run.is_whole:
                    axis.plot(*points[-1], "x", color=colour, ms=6)
            for name, value, dash, above in marks:
                axis.axhline(value, color="#777777", lw=0.8, ls=dash, zorder=0)
                if column == columns - 1:
                    axis.annotate(
                        *(name, (0.99, value), (0, above)),
                        xycoords=axis.get_yaxis_transform(),
                        textcoords="offset points",
                        ha="right",
                        fontsize=6.5,
                        color="#555555",
                    )
            logarithmic(axis, "y")
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_xlabel(label, fontsize=8)
            axis.tick_params(labelsize=8)
        grid[0][column].set_title(f"batches of {title}", fontsize=9)
    for row in grid:
        row[0].set_xlim(left=0)
        row[0].set_ylabel("held-out perplexity", fontsize=8)
    methods = list(dict.fromkeys(run.method for runs in panels_of.values() for run in runs))
    handles = [Line2D([], [], color=STYLES[key].colour, lw=1.6, ls=_dash(key)) for key in methods]
    titles = [METHODS[key].title for key in methods]
    figure.legend(handles, titles, loc="outside lower center", ncols=len(titles), fontsize=8, frameon=False)
    return figure


def _dash(method: str) -> str:
    """Lines that coincide show as dashes of both colours."""
    return "-" if method == BASE else "--"


def differences(panels_of: Mapping[str, Sequence[LoggedRun]]) -> Figure | None:
    """A column per batch size that has pairs, a line per pair: perplexity less Original's in per cent.

    Lines are broken where evaluations are missing. Scales are those of the later half, as differences are
    large while one run of a pair has left the plateau and the other has not.
    """
    pairs = {title: run_pairs for title, runs in panels_of.items() if (run_pairs := list(_pairs(runs)))}
    if not pairs:
        return None
    figure = Figure(
        figsize=(3.1 * len(pairs) + 0.6, 3.0) if len(pairs) > 1 else (6.4, 3.0), layout="constrained"
    )
    grid = figure.subplots(1, len(pairs), squeeze=False, sharey=True)[0]
    reach = max(
        abs(value) for run_pairs in pairs.values() for _, points in run_pairs for _, value in _later(points)
    )
    for axis, (title, run_pairs) in zip(grid, pairs.items(), strict=True):
        axis.axhline(0, color=STYLES[BASE].colour, lw=1.2)
        for run, points in run_pairs:
            colour = STYLES[run.method].colour
            axis.plot(*zip(*_with_breaks(points), strict=True), color=colour, lw=1.2)
            step, value = points[-1]
            axis.plot(step / 1e3, value, "o", color=colour, ms=3)
            axis.annotate(
                *(f"seed {run.seed}: {value:+.1f} %", (step / 1e3, value), (5, 0)),
                textcoords="offset points",
                va="center",
                annotation_clip=False,
                fontsize=7,
                color=colour,
            )
        axis.set_title(f"batches of {title}", fontsize=9)
        axis.set_xlabel("thousand steps", fontsize=8)
        axis.set_xlim(left=0)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylim(-1.4 * max(reach, LEAST_REACH), 1.4 * max(reach, LEAST_REACH))
    others = {METHODS[run.method].title for run_pairs in pairs.values() for run, _ in run_pairs}
    words = f"{' or '.join(sorted(others))} less {METHODS[BASE].title}, % of perplexity"
    grid[0].set_ylabel(words, fontsize=8)
    return figure


def _pairs(runs: Sequence[LoggedRun]) -> Iterable[tuple[LoggedRun, Points]]:
    """Runs of other methods beside Original of the same seed: per cent of perplexity at shared steps."""
    base = {run.seed: dict(run.points) for run in runs if run.method == BASE}
    for run in runs:
        base_run = base.get(run.seed, {})
        shared = [
            (step, 100 * (perplexity / base_run[step] - 1))
            for step, perplexity in run.points
            if step in base_run
        ]
        if run.method != BASE and shared:
            yield run, shared


def _later(points: Points) -> Points:
    return [point for point in points if point[0] >= points[-1][0] / 2]


def _with_breaks(points: Points) -> Points:
    """Thousands of steps and values, with NaN where evaluations are missing."""
    usual = float(np.median(np.diff([step for step, _ in points]))) if len(points) > 1 else math.inf
    broken: list[tuple[float, float]] = []
    for step, value in points:
        if broken and step - 1e3 * broken[-1][0] > GAP * usual:
            broken.append((step / 1e3, math.nan))
        broken.append((step / 1e3, value))
    return broken

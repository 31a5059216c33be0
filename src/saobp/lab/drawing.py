"""The figures of the lab, from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from saobp.metrics.figures import COLOURS

DOTS_PER_INCH = 130
PANEL = (3.3, 2.7)
PLAIN: dict[Any, Any] = {"svg.hashsalt": "saobp", "svg.fonttype": "none"}

Points = Sequence[tuple[float, float]]


def colour_of(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """``path.svg`` and ``path.png``, the same bytes each time."""
    svg, png = path.with_name(f"{path.name}.svg"), path.with_name(f"{path.name}.png")
    with matplotlib.rc_context(PLAIN):
        figure.savefig(svg, metadata={"Date": None}, dpi=DOTS_PER_INCH)
    figure.savefig(png, dpi=DOTS_PER_INCH)
    return [svg, png]


def panels(count: int, columns: int = 4, size: tuple[float, float] = PANEL) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, unused places hidden."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(rows, columns)).flatten())
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[:count]


def dots(
    measures: Mapping[str, Mapping[str, Mapping[int, float]]],
    paper: Mapping[str, Mapping[str, float]] | None = None,
) -> Figure:
    """A panel per measure: methods down, a dot per seed, a bar at the mean, a cross for the paper.

    A thin line joins the dots of a seed, which are pairs.
    """
    measures = {measure: methods for measure, methods in measures.items() if any(methods.values())}
    rows = max(len(methods) for methods in measures.values())
    height = max(1.6, 0.3 * rows + 0.9)
    figure, axes = panels(len(measures), columns=3, size=(4.2, height))
    for axis, (measure, methods) in zip(axes, measures.items(), strict=True):
        for seed in {seed: None for values in methods.values() for seed in values}:
            pairs = [(own[seed], place) for place, own in enumerate(methods.values()) if seed in own]
            axis.plot(*zip(*pairs, strict=True), color="#bbbbbb", lw=0.7, zorder=0)
        for place, (title, values) in enumerate(methods.items()):
            colour = colour_of(place)
            axis.plot(
                list(values.values()), [place] * len(values), "o", color=colour, alpha=0.55, ms=5, mec="none"
            )
            if values:
                mean = float(np.mean(list(values.values())))
                axis.plot([mean, mean], [place - 0.3, place + 0.3], color=colour, lw=2)
            theirs = (paper or {}).get(measure, {}).get(title)
            if theirs is not None:
                axis.plot([theirs], [place], "x", color="#444444", ms=6)
        axis.set_yticks(range(len(methods)), [_safe(title) for title in methods], fontsize=8)
        axis.set_ylim(len(methods) - 0.5, -0.5)
        _widen(axis, "x", [value for own in methods.values() for value in own.values()])
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(_safe(measure), fontsize=9)
        axis.grid(axis="x", lw=0.4, alpha=0.5)
    if paper and any(paper.values()):
        figure.supxlabel("dots: seeds, joined in pairs; bar: mean; x: the paper", fontsize=7)
    else:
        figure.supxlabel("dots: seeds, joined in pairs; bar: mean", fontsize=7)
    return figure


def curves(
    measures: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    labels: Mapping[str, str],
    columns: int = 4,
) -> Figure:
    """A panel per measure: a line per method over layers or heads, mean over seeds, with their range."""
    figure, axes = panels(len(measures), columns=columns)
    drawn: dict[str, Any] = {}
    for axis, (measure, methods) in zip(axes, measures.items(), strict=True):
        longest, shade = 1, 0.15 if len(methods) <= 4 else 0.06
        for place, (title, seeds) in enumerate(methods.items()):
            if not seeds:
                continue
            grid = np.array(seeds, dtype=float)
            steps = np.arange(grid.shape[1])
            longest = max(longest, len(steps))
            (line,) = axis.plot(
                steps, grid.mean(0), "o-", color=colour_of(place), ms=3, lw=1.4, label=_safe(title)
            )
            drawn.setdefault(title, line)
            axis.fill_between(steps, grid.min(0), grid.max(0), color=colour_of(place), alpha=shade, lw=0)
        axis.set_xticks(range(longest))
        axis.set_title(_safe(measure), fontsize=9)
        axis.set_xlabel(labels.get(measure, "layer"), fontsize=8)
        axis.tick_params(labelsize=8)
    figure.legend(
        list(drawn.values()),
        [_safe(title) for title in drawn],
        loc="outside lower center",
        ncols=min(4, max(1, len(drawn))),
        fontsize=8,
        frameon=False,
    )
    return figure


def progress(methods: Mapping[str, Sequence[Points]]) -> Figure:
    """Perplexity over tokens, a line per run, a colour per method."""
    figure, (axis,) = panels(1, size=(6.4, 4.2))
    for place, (title, runs) in enumerate(methods.items()):
        for number, points in enumerate(runs):
            label = _safe(title) if number == 0 else None
            style = "-" if place < len(COLOURS) else "--"
            axis.plot(
                *zip(*points, strict=True), style, color=colour_of(place), lw=1.2, alpha=0.8, label=label
            )
    _widen(axis, "y", [y for runs in methods.values() for points in runs for _, y in points])
    axis.set_xlabel("million tokens", fontsize=8)
    axis.set_ylabel("held-out perplexity", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7, frameon=False)
    return figure


def scatter_with_margins(
    series: Mapping[str, Mapping[str, Points]], x_label: str, notes: Mapping[str, str]
) -> Figure:
    """A panel per measure: points of each method with histograms of both variables at the margins."""
    figure = Figure(figsize=(4.6 * len(series), 4.3), layout="constrained")
    parts = figure.subfigures(1, len(series), squeeze=False)[0]
    for part, (measure, methods) in zip(parts, series.items(), strict=True):
        grid = part.subplots(
            2, 2, sharex="col", sharey="row", gridspec_kw={"width_ratios": (4, 1), "height_ratios": (1, 4)}
        )
        top, corner, main, side = grid[0][0], grid[0][1], grid[1][0], grid[1][1]
        corner.set_visible(False)
        everything = np.array([point for points in methods.values() for point in points], dtype=float)
        bins = [np.histogram_bin_edges(side, 40) for side in everything.T]
        for place, (title, points) in enumerate(methods.items()):
            if not points:
                continue
            x, y = np.array(points, dtype=float).T
            colour = colour_of(place)
            main.plot(
                x, y, ".", color=colour, alpha=0.35, ms=4, mec="none", label=_safe(title), rasterized=True
            )
            top.hist(x, bins=bins[0], color=colour, alpha=0.5)
            side.hist(y, bins=bins[1], orientation="horizontal", color=colour, alpha=0.5)
        for axis in (top, side):
            axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
            axis.tick_params(length=0, labelleft=False, labelbottom=False)
        main.spines[["top", "right"]].set_visible(False)
        main.set_xlabel(x_label, fontsize=9)
        main.set_ylabel(_safe(measure), fontsize=9)
        main.tick_params(labelsize=8)
        main.legend(fontsize=7, frameon=False, markerscale=2)
        top.set_title(notes.get(measure, ""), fontsize=8)
    return figure


def correlations(
    series: Mapping[str, Mapping[str, Points]], x_label: str, notes: Mapping[str, str]
) -> Figure:
    """A panel per score: a dot per checkpoint, by method."""
    figure, axes = panels(len(series), columns=4)
    for axis, (measure, methods) in zip(axes, series.items(), strict=True):
        for place, (title, points) in enumerate(methods.items()):
            if points:
                x, y = np.array(points, dtype=float).T
                axis.plot(x, y, "o", color=colour_of(place), alpha=0.7, ms=4, mec="none", label=_safe(title))
        axis.set_xlabel(x_label, fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.set_ylabel(_safe(measure), fontsize=8)
        if "perplexity" in measure:
            _widen(axis, "y", [y for points in methods.values() for _, y in points])
        axis.tick_params(labelsize=8)
        axis.set_title(notes.get(measure, ""), fontsize=8)
    if axes:
        axes[0].legend(fontsize=7, frameon=False)
    return figure


def map_grid(rows: Mapping[str, np.ndarray], *, binary: bool = False) -> Figure:
    """A row per subject, a column per head, of maps ``[heads, length, length]`` on one scale of colours."""
    heads = max(maps.shape[0] for maps in rows.values())
    figure = Figure(figsize=(1.75 * heads + 1.6, 1.8 * len(rows) + 0.4), layout="constrained")
    grid = figure.subplots(len(rows), heads, squeeze=False)
    image = None
    for row, (axes, (title, maps)) in enumerate(zip(grid, rows.items(), strict=True)):
        for head, axis in enumerate(axes):
            if head >= maps.shape[0]:
                axis.set_visible(False)
                continue
            if binary:
                image = axis.imshow(maps[head], vmin=0, vmax=1, cmap="Greys_r", interpolation="nearest")
            else:
                shown = np.log10(np.maximum(maps[head], 1e-4))
                image = axis.imshow(shown, vmin=-4, vmax=0, cmap="magma", interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(f"head {head}", fontsize=8)
        axes[0].set_ylabel(_safe(title), fontsize=8)
    if image is not None and not binary:
        bar = figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.7, ticks=[-4, -3, -2, -1, 0])
        bar.ax.set_yticklabels(["≤ 0.0001", "0.001", "0.01", "0.1", "1"], fontsize=7)
        bar.set_label("attention", fontsize=8)
    return figure


def head_grid(grids: Mapping[str, np.ndarray], label: str) -> Figure:
    """A panel per subject: layers down, heads across, numbers in the cells, red against blue around zero."""
    figure = Figure(figsize=(2.5 * len(grids) + 0.9, 2.7), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(grids)))
    most = max(float(np.abs(grid).max()) for grid in grids.values()) or 1.0
    image = None
    for axis, (title, grid) in zip(axes, grids.items(), strict=True):
        image = axis.imshow(grid, vmin=-most, vmax=most, cmap="RdBu_r", aspect="auto")
        for (layer, head), value in np.ndenumerate(grid):
            shade = "white" if abs(value) > 0.6 * most else "black"
            axis.text(head, layer, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade)
        axis.set_title(_safe(title), fontsize=8)
        axis.set_xlabel("head", fontsize=8)
        axis.set_xticks(range(grid.shape[1]))
        axis.set_yticks(range(grid.shape[0]))
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("layer", fontsize=8)
    assert image is not None
    figure.colorbar(image, ax=list(axes), label=label, shrink=0.9)
    return figure


def _widen(axes: Axes, side: Literal["x", "y"], values: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers if values are of several sizes: the small ones would not show."""
    if not values or min(values) <= 0 or max(values) < 2.5 * min(values):
        return
    axes.set(**{f"{side}scale": "log"})
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _safe(title: str) -> str:
    """No mathematics by accident."""
    return title.replace("$", r"\$")

"""The figures of the lab, from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from saobp.lab.axes import far_beyond, fit, logarithmic
from saobp.lab.cells import three_digits
from saobp.lab.method_style import STYLES
from saobp.lab.methods import METHODS
from saobp.lab.statistics import Chance, Gain
from saobp.metrics.diagnosis.head_plots import panels

DOTS_PER_INCH = 130
PANEL = (3.3, 2.7)
PLAIN: dict[Any, Any] = {"svg.hashsalt": "saobp", "svg.fonttype": "none"}

Points = Sequence[tuple[float, float]]


class Gap(NamedTuple):
    """A difference between two models, by seed and on the mean, beside chance and the paper's."""

    chance: Chance
    pairs: Sequence[float]
    gain: Gain
    paper: float | None


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """``path.svg`` and ``path.png``, byte-reproducible."""
    svg, png = path.with_name(f"{path.name}.svg"), path.with_name(f"{path.name}.png")
    with matplotlib.rc_context(PLAIN):
        figure.savefig(svg, metadata={"Date": None}, dpi=DOTS_PER_INCH)
    figure.savefig(png, dpi=DOTS_PER_INCH)
    return [svg, png]


def dots(
    measures: Mapping[str, Mapping[str, Mapping[int, float]]],
    paper: Mapping[str, Mapping[str, float]] | None = None,
) -> Figure:
    """A panel per measure: methods down, a mark per seed, bar and number at the mean, a cross for the paper.

    A thin line joins the paired marks of a seed between neighbouring methods.
    """
    measures = {measure: methods for measure, methods in measures.items() if any(methods.values())}
    keys = _all_of(measures)
    columns = 2 if len(measures) in (2, 4) else 3
    figure, axes = panels(len(measures), columns, (3.9, max(1.7, 0.3 * len(keys) + 0.9)))
    for index, (axis, (measure, methods)) in enumerate(zip(axes, measures.items(), strict=True)):
        crosses = (paper or {}).get(measure, {})
        rows = [methods.get(key, {}) for key in keys]
        _join_pairs(axis, rows)
        for row, (key, values) in enumerate(zip(keys, rows, strict=True)):
            _row(axis, row, key, list(values.values()), crosses.get(key))
        axis.set_yticks(range(len(keys)), [METHODS[key].title for key in keys], fontsize=8)
        if index % columns:
            axis.tick_params(axis="y", labelleft=False, length=0)
        axis.set_ylim(len(keys) - 0.5, -0.5)
        theirs = [[crosses[key]] if key in crosses else [] for key in keys]
        fit(axis, "x", [[*own.values(), *also] for own, also in zip(rows, theirs, strict=True)])
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(_safe(measure), fontsize=9)
        axis.grid(axis="x", lw=0.4, alpha=0.5)
    figure.set_layout_engine("constrained", wspace=0.07)
    cross = "; x: the paper" if any((paper or {}).values()) else ""
    figure.supxlabel(f"a mark per seed, joined in pairs; bar and number: mean{cross}", fontsize=8)
    return figure


def _join_pairs(axis: Axes, rows: Sequence[Mapping[int, float]]) -> None:
    for row, (upper, lower) in enumerate(pairwise(rows)):
        for seed in (seed for seed in upper if seed in lower):
            axis.plot([upper[seed], lower[seed]], [row, row + 1], color="#bbbbbb", lw=0.7, zorder=0)


def _row(axis: Axes, row: int, key: str, values: Sequence[float], paper: float | None) -> None:
    colour, marker = STYLES[key]
    axis.plot(values, [row] * len(values), marker, color=colour, alpha=0.6, ms=5, mec="none")
    if values:
        mean = float(np.mean(values))
        axis.plot([mean, mean], [row - 0.3, row + 0.3], color=colour, lw=2)
    if paper is not None:
        axis.plot([paper], [row], "x", color="#444444", ms=6)
    label, shade = (three_digits(mean), "#222222") if values else ("no number", "#777777")
    beside = axis.get_yaxis_transform()
    axis.text(1.01, row, label, transform=beside, fontsize=8, va="center", color=shade)


def curves(
    measures: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], labels: Mapping[str, str]
) -> Figure:
    """A panel per measure: a line per method over layers or heads, mean over seeds, with their range."""
    figure, axes = panels(len(measures), 4, PANEL)
    for axis, (measure, methods) in zip(axes, measures.items(), strict=True):
        longest, shade = 1, 0.15 if len(methods) <= 4 else 0.06
        for key, seeds in methods.items():
            if not seeds:
                continue
            colour, marker = STYLES[key]
            grid = np.array(seeds, dtype=float)
            steps = np.arange(grid.shape[1])
            longest = max(longest, len(steps))
            axis.plot(steps, grid.mean(0), f"{marker}-", color=colour, ms=4, lw=1.4)
            axis.fill_between(steps, grid.min(0), grid.max(0), color=colour, alpha=shade, lw=0)
        axis.set_xticks(range(longest))
        axis.set_title(_safe(measure), fontsize=9)
        axis.set_xlabel(labels.get(measure, "layer"), fontsize=8)
        axis.tick_params(labelsize=8)
    _legend_below(figure, _all_of(measures))
    return figure


def progress(methods: Mapping[str, Mapping[int, Points]]) -> Figure:
    """Perplexity over tokens, a line per run; and the later half as paired differences from the first."""
    figure, (whole, end) = panels(2, 2, (5.0, 4.0))
    for key, runs in methods.items():
        for points in runs.values():
            whole.plot(*zip(*points, strict=True), color=STYLES[key].colour, lw=1.0, alpha=0.7)
    logarithmic(whole, "y")
    whole.set_title("every run", fontsize=9)
    whole.set_ylabel("held-out perplexity", fontsize=8)
    (base, base_runs), *others = methods.items()
    apart = {key: found for key, runs in others if (found := _mean_paired_difference(runs, base_runs))}
    beyond = far_beyond([[y for _, y in points] for points in apart.values()])
    left_out = None if beyond is None else list(apart)[beyond]
    for key, points in apart.items():
        if key != left_out:
            colour, marker = STYLES[key]
            end.plot(*zip(*points, strict=True), f"{marker}-", color=colour, lw=1.2, ms=4)
            for pair in _paired_differences(methods[key], base_runs) if len(apart) == 1 else ():
                end.plot(*zip(*pair, strict=True), color=colour, lw=0.8, alpha=0.6)
    end.axhline(0, color=STYLES[base].colour, lw=1.2)
    note = (
        ""
        if left_out is None
        else f"\n{METHODS[left_out].title} is beyond: {apart[left_out][-1][1]:+.1f} at the end"
    )
    shown = "mean and single pairs" if len(apart) == 1 else "mean of pairs"
    end.set_title(f"less {METHODS[base].title} of the same seed, {shown}{note}", fontsize=9)
    end.set_ylabel("difference in perplexity", fontsize=8)
    for axis in (whole, end):
        axis.set_xlabel("million tokens", fontsize=8)
        axis.tick_params(labelsize=8)
    _legend_below(figure, list(methods))
    return figure


def gaps_beside_chance(gaps: Mapping[str, Gap]) -> Figure:
    """A row per task: chance as a band, differences of pairs with their mean and interval, the paper's."""
    figure = Figure(figsize=(7.2, 0.55 * len(gaps) + 1.4), layout="constrained")
    axis = figure.subplots()
    colour = STYLES["high"].colour
    axis.axvline(0, color="#888888", lw=1)
    for row, gap in enumerate(gaps.values()):
        reach = gap.chance.apart
        band = axis.barh(row, 2 * reach, left=-reach, height=0.62, color="#dddddd", zorder=0)
        axis.text(reach, row, f" ±{reach:.1f}", fontsize=8, color="#555555", va="center")
        own = axis.plot(gap.pairs, [row + 0.14] * len(gap.pairs), "o", color=colour, alpha=0.6, ms=4)
        if gap.gain.low is not None and gap.gain.high is not None:
            axis.plot([gap.gain.low, gap.gain.high], [row - 0.14] * 2, color=colour, lw=2)
        mean = axis.plot(gap.gain.difference, row - 0.14, "|-", color=colour, ms=9, mew=2, lw=2)
        if gap.paper is not None:
            paper = axis.plot(gap.paper, row, "x", color="#000000", ms=8, mew=1.8)
            axis.text(gap.paper, row - 0.3, f"{gap.paper:+.2f}", fontsize=8, ha="center", va="bottom")
    axis.set_yticks(range(len(gaps)), [_safe(name) for name in gaps], fontsize=9)
    axis.set_ylim(len(gaps) - 0.5, -0.65)
    axis.margins(x=0.06)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("score of High less that of Original, points", fontsize=8)
    handles: list[Any] = [band, own[0], mean[0]]
    labels = [
        "one model, two seeds: 95 % of differences",
        "ours, a dot per seed",
        "ours, mean with 95 % interval",
    ]
    if any(gap.paper is not None for gap in gaps.values()):
        handles, labels = [*handles, paper[0]], [*labels, "the paper, one run each"]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _mean_paired_difference(runs: Mapping[int, Points], base: Mapping[int, Points]) -> Points:
    """Mean paired difference by seed, where all runs have a value, in the later half."""
    pairs = _paired_differences(runs, base)
    return [(own[0][0], float(np.mean([value for _, value in own]))) for own in zip(*pairs, strict=True)]


def _paired_differences(runs: Mapping[int, Points], base: Mapping[int, Points]) -> list[Points]:
    """Differences of each seed, where all runs have a value, in the later half."""
    pairs = [(dict(points), dict(base[seed])) for seed, points in runs.items() if seed in base]
    shared = set.intersection(*(own.keys() & other.keys() for own, other in pairs)) if pairs else set()
    late = sorted(x for x in shared if x >= max(shared) / 2)
    return [[(x, own[x] - other[x]) for x in late] for own, other in pairs]


def _all_of(parts: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Methods of any panel, in the order in which they first appear."""
    return list(dict.fromkeys(key for methods in parts.values() for key in methods))


def _legend_below(figure: Figure, keys: Sequence[str], line: str = "-") -> None:
    """A legend of some methods, below all panels."""
    handles = [
        Line2D([], [], color=style.colour, marker=style.marker, ms=4, lw=1.4, ls=line)
        for style in (STYLES[key] for key in keys)
    ]
    figure.legend(
        *(handles, [METHODS[key].title for key in keys]),
        loc="outside lower center",
        ncols=min(6, len(keys)),
        fontsize=8,
        frameon=False,
    )


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
        colours = [STYLES[key].colour for key, points in methods.items() for _ in points]
        mixed = np.random.default_rng(0).permutation(len(everything))
        main.scatter(*everything[mixed].T, s=5, c=np.array(colours)[mixed], alpha=0.35, lw=0, rasterized=True)
        for key, points in methods.items():
            if not points:
                continue
            x, y = np.array(points, dtype=float).T
            colour = STYLES[key].colour
            top.hist(x, bins=bins[0], color=colour, alpha=0.5)
            side.hist(y, bins=bins[1], orientation="horizontal", color=colour, alpha=0.5)
        for axis in (top, side):
            axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
            axis.tick_params(length=0, labelleft=False, labelbottom=False)
        main.spines[["top", "right"]].set_visible(False)
        main.set_xlabel(x_label, fontsize=9)
        main.set_ylabel(_safe(measure), fontsize=9)
        main.tick_params(labelsize=8)
        top.set_title(notes.get(measure, ""), fontsize=8)
    _legend_below(figure, _all_of(series), line="")
    return figure


def correlations(
    series: Mapping[str, Mapping[str, Points]], x_label: str, notes: Mapping[str, str]
) -> Figure:
    """A panel per score: a dot per checkpoint, by method."""
    figure, axes = panels(len(series), 4, PANEL)
    for axis, (measure, methods) in zip(axes, series.items(), strict=True):
        for key, points in methods.items():
            if points:
                colour, marker = STYLES[key]
                axis.plot(*np.array(points).T, marker, color=colour, alpha=0.7, ms=4, mec="none")
        axis.set_xlabel(x_label, fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.set_ylabel(_safe(measure), fontsize=8)
        if "perplexity" in measure:
            logarithmic(axis, "y")
        axis.tick_params(labelsize=8)
        axis.set_title(notes.get(measure, ""), fontsize=8)
    _legend_below(figure, _all_of(series), line="")
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


def _safe(title: str) -> str:
    """Escape mathtext."""
    return title.replace("$", r"\$")

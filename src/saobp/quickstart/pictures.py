"""Attention maps before and after, and the numbers of every head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from saobp.metrics.figures import COLOURS, TITLES
from saobp.quickstart.comparison import STATISTICS, Comparison

LABEL_SIZE = 8


def draw_maps(comparison: Comparison, heads: Sequence[tuple[int, int]]) -> Figure:
    """One line per head: before and after on one scale, and the difference around zero."""
    side = 1.1 + 0.17 * len(comparison.tokens)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(3 * side + 1.2, len(heads) * side + 0.4), layout=layout)
    panels = figure.subplots(len(heads), 3, squeeze=False)
    for line, (layer, head) in zip(panels, heads, strict=True):
        before = comparison.before.rows[layer, head].numpy()
        after = comparison.after.rows[layer, head].numpy()
        top = max(before.max(), after.max())
        change = after - before
        reach = abs(change).max()
        place = f"layer {layer}, head {head}"
        _map(line[0], before, comparison.tokens, f"{place}: softmax", vmin=0, vmax=top, cmap="Blues")
        image = _map(line[1], after, [], comparison.refinement, vmin=0, vmax=top, cmap="Blues")
        figure.colorbar(image, ax=line[1], shrink=0.8, pad=0.02)
        image = _map(line[2], change, [], "difference", vmin=-reach, vmax=reach, cmap="RdBu_r")
        figure.colorbar(image, ax=line[2], shrink=0.8, pad=0.02)
    for panel in panels[-1]:
        panel.set_xticks(
            range(len(comparison.tokens)),
            comparison.tokens,
            rotation=90,
            fontsize=LABEL_SIZE,
            parse_math=False,
        )
    return figure


def draw_heads(comparison: Comparison) -> Figure:
    """Each head's numbers on held-out text: a line from before to after."""
    names = [f"layer {head.layer}, head {head.head}" for head in comparison.before.heads]
    figure = Figure(figsize=(10, 0.9 + 0.26 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(STATISTICS), sharey=True)
    places = range(len(names))
    for panel, statistic in zip(panels, STATISTICS, strict=True):
        before, after = (
            [head.values[statistic] for head in look.heads] for look in (comparison.before, comparison.after)
        )
        panel.hlines(places, before, after, color="#b8bec6", zorder=1)
        panel.scatter(before, places, color=COLOURS[0], s=28, label="softmax", zorder=2)
        panel.scatter(after, places, color=COLOURS[1], s=28, label=comparison.refinement, zorder=2)
        panel.set_title(TITLES[statistic], fontsize=10)
        panel.set_yticks(places, names, fontsize=LABEL_SIZE)
        panel.tick_params(axis="x", labelsize=LABEL_SIZE)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x", color="#eceff2")
        panel.set_axisbelow(True)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _map(panel: Axes, values: numpy.ndarray, rows: Sequence[str], title: str, **colours: Any) -> Any:
    image = panel.imshow(values, **colours)
    panel.set_title(title, fontsize=10)
    panel.set_xticks([])
    panel.set_yticks(range(len(rows)), rows, fontsize=LABEL_SIZE, parse_math=False)
    panel.tick_params(length=0)
    panel.spines[:].set_color("#c9ced6")
    return image

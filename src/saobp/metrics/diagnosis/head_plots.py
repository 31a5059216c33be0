"""Heat maps of layers and heads, and curves over layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from saobp.metrics.diagnosis.diagnose import Diagnosis
from saobp.metrics.diagnosis.head_names import COLOURS, MARKS, TITLES
from saobp.metrics.health.verdicts import DIFFUSE_ABOVE, HEALTHY_FROM, HEALTHY_TO, LOCALISED_BELOW

_GTD_COLOURS = LinearSegmentedColormap.from_list(
    "gtd",
    [
        (0.0, "#8c2d19"),
        (LOCALISED_BELOW, "#f0c9a8"),
        (HEALTHY_FROM, "#d3e8cd"),
        (HEALTHY_TO, "#d3e8cd"),
        (DIFFUSE_ABOVE, "#b9cfe6"),
        (1.0, "#1d4477"),
    ],
)


def heat_map(diagnoses: Sequence[Diagnosis], statistic: str) -> Figure:
    """Layers down, heads across, one panel per diagnosis on a common scale; alarming heads are marked."""
    grids = [_grid(diagnosis, statistic) for diagnosis in diagnoses]
    finite = numpy.concatenate([grid[numpy.isfinite(grid)] for grid in grids] or [numpy.zeros(1)])
    high = 1.0 if statistic == "gtd" or not len(finite) else max(float(finite.max()), 1e-9)
    layers, heads = (max(sizes) for sizes in zip(*(grid.shape for grid in grids), strict=True))
    width = min(14.0, max(2.6, 0.42 * heads)) * len(grids) + 1.6
    figure = Figure(figsize=(width, max(2.4, 0.34 * layers + 1.3)), layout="constrained")
    is_equal = len({len(grid) for grid in grids}) == 1
    axes = numpy.atleast_1d(figure.subplots(1, len(grids), sharey=is_equal))
    colours = _GTD_COLOURS if statistic == "gtd" else "viridis"
    image = None
    for panel, diagnosis, grid in zip(axes, diagnoses, grids, strict=True):
        image = panel.imshow(grid, vmin=0.0, vmax=high, cmap=colours, aspect="auto")
        panel.set_title(short_name(diagnosis.subject), fontsize=9)
        panel.set_xlabel("head")
        panel.set_xticks(range(0, grid.shape[1], max(1, grid.shape[1] // 8)))
        panel.set_yticks(range(0, grid.shape[0], max(1, grid.shape[0] // 12)))
        for head in diagnosis.heads:
            if head.verdict in MARKS:
                mark = panel.text(head.head, head.layer, MARKS[head.verdict], ha="center", va="center")
                mark.set(fontsize=7, path_effects=[withStroke(linewidth=1.5, foreground="white")])
    axes[0].set_ylabel("layer")
    legend = [f"{mark} {word}" for word, mark in MARKS.items() if mark != "?"]
    if statistic == "gtd":
        legend.append("green: healthy GTD (under a causal mask, up to more); entropy and sinks count first")
    figure.supxlabel("   ".join(legend), fontsize=7)
    assert image is not None
    bar = figure.colorbar(image, ax=list(axes), label=TITLES[statistic], shrink=0.9)
    if statistic == "gtd":
        bar.ax.hlines([HEALTHY_FROM, HEALTHY_TO], 0, 1, color=COLOURS[2], linewidth=2)
    return figure


def layer_curves(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Mean over heads of each statistic per layer with the range of heads, and GTD's healthy zone."""
    statistics = list(diagnoses[0].statistics)
    across = any(diagnosis.across_layers for diagnosis in diagnoses)
    names = [*statistics, *(["cross_layer_gtd"] if across else [])]
    deepest = max(diagnosis.layers for diagnosis in diagnoses)
    figure, axes = panels(len(names), 3, (3.6, 2.7))
    for panel, name in zip(axes, names, strict=True):
        if name in ("gtd", "cross_layer_gtd"):
            panel.axhspan(HEALTHY_FROM, HEALTHY_TO, color="#dcebd8", zorder=0)
            panel.set_ylim(0, 1)
        for index, diagnosis in enumerate(diagnoses):
            _curve(panel, diagnosis, name, COLOURS[index % len(COLOURS)])
        panel.set_title(TITLES[name], fontsize=9)
        panel.set_xlabel("layer")
        panel.set_xlim(-0.3, deepest - 0.7)
        panel.set_xticks(range(0, deepest, max(1, deepest // 8)))
    if len(diagnoses) > 1:
        axes[0].legend(fontsize=7, frameon=False)
    return figure


def panels(count: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels of a size in inches, in rows of ``columns``; unused axes are hidden."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = list(numpy.atleast_1d(figure.subplots(rows, columns)).flatten())
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[:count]


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    return path


def _curve(panel: Axes, diagnosis: Diagnosis, name: str, colour: str) -> None:
    label = short_name(diagnosis.subject)
    if name == "cross_layer_gtd":
        panel.plot(
            list(diagnosis.across_layers),
            list(diagnosis.across_layers.values()),
            "o-",
            color=colour,
            label=label,
            markersize=3,
        )
        return
    layers = range(diagnosis.layers)
    values = [numpy.array([head.values[name] for head in diagnosis.layer(layer)]) for layer in layers]
    low, high = [heads.min() for heads in values], [heads.max() for heads in values]
    panel.plot(layers, [heads.mean() for heads in values], "o-", color=colour, label=label, markersize=3)
    panel.vlines(layers, low, high, color=colour, alpha=0.3)
    panel.fill_between(layers, low, high, color=colour, alpha=0.15, lw=0)


def _grid(diagnosis: Diagnosis, statistic: str) -> numpy.ndarray:
    grid = numpy.full((diagnosis.layers, 1 + max(head.head for head in diagnosis.heads)), numpy.nan)
    for head in diagnosis.heads:
        grid[head.layer, head.head] = head.values[statistic]
    return grid


def short_name(subject: str) -> str:
    plain = subject.replace("$", r"\$")
    return plain if len(plain) <= 36 else f"…{plain[-35:]}"

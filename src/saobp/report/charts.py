"""Curves and heat maps of the page as plotly figures.

A figure is plotly's ``data`` and ``layout``, validated by plotly. Colours of light and dark mode are not set:
a trace names its run in ``meta``, and the page's script sets the colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from saobp.metrics.diagnosis.head_names import TITLES
from saobp.metrics.health.verdicts import (
    COLLAPSED_BELOW,
    DIFFUSE_ABOVE,
    HEALTHY_FROM,
    HEALTHY_TO,
    LOCALISED_BELOW,
    SINK_FROM,
)
from saobp.report.curves import AXES
from saobp.report.page_assets import MissingPlotlyError
from saobp.report.run_view import Run
from saobp.report.snapshots import Snapshot
from saobp.report.summaries import shown

Figure = dict[str, Any]
NAMES = {
    "loss": "Training loss",
    "eval_loss": "Validation loss",
    "eval_perplexity": "Validation perplexity",
    "eval_accuracy": "Validation accuracy",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
}
FIRST = ("loss", "eval_loss", "eval_perplexity", "eval_accuracy")
DASHES = ("solid", "dash", "dot", "dashdot")
COLOURS_OF_RUNS = 8
DOTS_UP_TO = 16
NUMBERS_UP_TO = 16
LAYER_TICKS = 12
HEIGHT, ROW_HEIGHT = 230, 24
NAME_LETTERS = 28
"""Length limit of a run's name next to its value; legends and tables have all of it."""
STRENGTHS = "strengths"

Stops = Sequence[tuple[float, str]]


def _gtd_stops(colours: Sequence[str]) -> Stops:
    """Brown is localised, green healthy, blue diffuse; the colour jumps where the healthy range begins."""
    stops = (0.0, LOCALISED_BELOW, HEALTHY_FROM, HEALTHY_FROM, HEALTHY_TO, HEALTHY_TO, DIFFUSE_ABOVE, 1.0)
    return tuple(zip(stops, colours, strict=True))


GTD_SCALES = (
    _gtd_stops(["#8c2d19", "#f0c9a8", "#f6ecd9", "#cfe6c9", "#cfe6c9", "#e6edf3", "#b9cfe6", "#1d4477"]),
    _gtd_stops(["#d4603c", "#6e3f2b", "#3a3428", "#235037", "#235037", "#26323e", "#2c4d72", "#5fa8f5"]),
)
"""In light and in dark mode, where what stands out is brighter than its ground."""
AMOUNT_SCALES = (
    ((0.0, "#f7f3e8"), (0.35, "#e9c46a"), (0.7, "#c05f3c"), (1.0, "#4a1530")),
    ((0.0, "#1d232b"), (0.35, "#5c4a1e"), (0.7, "#b0613a"), (1.0, "#ffc27a")),
)
SIGNED_SCALES = (
    ((0.0, "#1d4477"), (0.5, "#f4f4f0"), (1.0, "#a3361b")),
    ((0.0, "#5fa8f5"), (0.5, "#1d232b"), (1.0, "#f0814f")),
)


def title_of(statistic: str) -> str:
    """Display name of a statistic."""
    if statistic == STRENGTHS:
        return "strength (λ)"
    return TITLES.get(statistic, statistic.replace("_", " "))


def strength_title(runs: Sequence[Run]) -> str:
    """Name of the strengths of some runs: learned, fixed, or both."""
    refined = {run.is_learned for run in runs if any(snapshot.strengths for snapshot in run.health)}
    kind = "" if len(refined) != 1 else "learned " if True in refined else "fixed "
    return f"{kind}{title_of(STRENGTHS)}"


def curve_figures(runs: Sequence[Run]) -> list[Figure]:
    """Every logged quantity of all runs, then the mean of every statistic over training.

    ``x`` holds each trace's coordinates on the alternative axes, ``isLog`` whether the vertical axis is
    initially logarithmic.
    """
    names = dict.fromkeys(name for run in runs for name in run.curves)
    return [*(_quantity(name, runs) for name in sorted(names, key=_rank)), *_means(runs)]


def _rank(name: str) -> int:
    if name in FIRST:
        return FIRST.index(name)
    return 30 if name == "learning_rate" else 10 if name.startswith("eval_") else 20


def _quantity(name: str, runs: Sequence[Run]) -> Figure:
    tells_how_it_ran = not name.startswith(("loss", "eval_")) or "per_second" in name or "runtime" in name
    lines = [(index, run, series) for index, run in enumerate(runs) for series in run.curves.get(name, [])]
    title = NAMES.get(name) or _capital(name.replace("eval_", "validation ", 1).replace("_", " "))
    traces = [
        _line(run, index, series.axes.get("step", []), series.values, series.of)
        for index, run, series in lines
    ]
    return {
        **_figure(f"curve-{name}", title, traces, _layout("step")),
        "x": {
            axis: [series.axes.get(axis, [None] * len(series.values)) for _, _, series in lines]
            for axis in AXES[1:]
        },
        "isLog": name.endswith("perplexity"),
        "isFolded": tells_how_it_ran,
    }


def _means(runs: Sequence[Run]) -> list[Figure]:
    """The mean over all heads over training, for runs measured more than once."""
    measured = [(index, run) for index, run in enumerate(runs) if len(run.health) > 1]
    figures = []
    for name in dict.fromkeys(name for _, run in measured for name in run.health[0].statistics):
        traces = [
            _line(
                run,
                index,
                [snapshot.step for snapshot in run.health],
                [_mean(_cells(snapshot, name)) for snapshot in run.health],
            )
            for index, run in measured
        ]
        title = f"{_capital(title_of(name))}, mean of all heads"
        figures.append(_figure(f"mean-{name}", title, traces, _layout("step", healthy=name == "gtd")))
    return figures


def head_figures(runs: Sequence[Run]) -> dict[str, Any]:
    """For the section of heads: scales and layer curves by statistic, and the grids of every snapshot."""
    measured = [(index, run) for index, run in enumerate(runs) if run.health]
    names = list(dict.fromkeys(name for _, run in measured for name in run.health[0].statistics))
    if any(snapshot.strengths for _, run in measured for snapshot in run.health):
        names.append(STRENGTHS)
    return {
        "steps": sorted({snapshot.step or 0 for _, run in measured for snapshot in run.health}),
        "titles": {
            name: strength_title([run for _, run in measured]) if name == STRENGTHS else title_of(name)
            for name in names
        },
        "scales": {name: _scale_of(name, [run for _, run in measured]) for name in names},
        "layers": {name: _layer_figure(name, measured) for name in names} if _depth(measured) > 1 else None,
        "across": _across_figure(measured),
        "runs": [
            {
                "name": run.name,
                "place": index,
                "layout": map_layout(run.health[-1].verdicts),
                "moments": [snapshot.to_dict() for snapshot in run.health],
            }
            for index, run in measured
        ],
    }


def _layer_figure(statistic: str, runs: Sequence[tuple[int, Run]]) -> Figure:
    """Without values, which depend on the selected step."""
    title = f"{_capital(title_of(statistic))} by layer, mean of its heads"
    traces = [_line(run, index, [], []) for index, run in runs]
    return _figure("layers", title, traces, _layout("layer", healthy=statistic == "gtd", layers=_depth(runs)))


def _across_figure(runs: Sequence[tuple[int, Run]]) -> Figure | None:
    if not any(len(run.health[-1].across) > 1 for _, run in runs):
        return None
    traces = [_line(run, index, [], []) for index, run in runs]
    return _figure(
        "across", TITLES["cross_layer_gtd"], traces, _layout("layer", healthy=True, layers=_depth(runs))
    )


def _depth(runs: Sequence[tuple[int, Run]]) -> int:
    return max(len(run.health[-1].verdicts) for _, run in runs)


def _line(
    run: Run, index: int, x: Sequence[float | None], y: Sequence[float | None], of: str = ""
) -> dict[str, Any]:
    """A curve of the run at this index on the page; ``of`` names one of its seeds, drawn fainter."""
    graphs = _graph_objects()
    name = f"{run.name}, {of}" if of else run.name
    return graphs.Scatter(
        name=_as_text(name if len(name) <= NAME_LETTERS else f"{name[: NAME_LETTERS - 1]}…"),
        x=list(x),
        y=[None if value is None else float(f"{value:.6g}") for value in y],
        mode="lines+markers" if len(y) <= DOTS_UP_TO else "lines",
        line={
            "width": 1.2 if of else 1.8,
            "dash": DASHES[(index // COLOURS_OF_RUNS + run.dash) % len(DASHES)],
        },
        marker={"size": 5},
        opacity=0.8 if of else 1,
        connectgaps=True,
        meta={"run": index % COLOURS_OF_RUNS, "place": index, "name": name},
    ).to_plotly_json()


def _layout(across: str, *, healthy: bool = False, layers: int = 0) -> dict[str, Any]:
    """One chart of lines; ``healthy`` fixes the axis to 0..1 and marks the healthy range of GTD."""
    graphs = _graph_objects()
    layout = graphs.Layout(
        height=HEIGHT,
        margin={"l": 46, "r": 18, "t": 8, "b": 38},
        showlegend=False,
        hovermode="x unified",
        xaxis={"title": {"text": across, "standoff": 6}, "showgrid": False},
        yaxis={"nticks": 6},
    )
    if layers:
        layout.xaxis.dtick = -(-layers // LAYER_TICKS)
    if healthy:
        layout.yaxis.range = [0, 1]
        layout.shapes = [
            {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": HEALTHY_FROM, "y1": HEALTHY_TO}
        ]
        layout.annotations = [
            {
                "text": f"healthy, {HEALTHY_FROM:g} to {HEALTHY_TO:g}",
                "xref": "paper",
                "x": 0.99,
                "xanchor": "right",
                "y": HEALTHY_FROM,
                "yanchor": "top",
                "showarrow": False,
            }
        ]
    return layout.to_plotly_json()


def gtd_scale() -> dict[str, Any]:
    """The heat map of GTD without its values, with the ranges that have a name beside it."""
    ticks = [
        (LOCALISED_BELOW / 2, f"localised<br>below {LOCALISED_BELOW:g}"),
        ((HEALTHY_FROM + HEALTHY_TO) / 2, f"<b>healthy</b><br>{HEALTHY_FROM:g} to {HEALTHY_TO:g}"),
        ((1 + DIFFUSE_ABOVE) / 2, f"high<br>above {DIFFUSE_ABOVE:g}"),
    ]
    limits = ((LOCALISED_BELOW, HEALTHY_FROM), (HEALTHY_TO, DIFFUSE_ABOVE))
    return _heat_map("gtd", (0.0, 1.0), GTD_SCALES, ticks, limits)


def _scale_of(statistic: str, runs: Sequence[Run]) -> dict[str, Any]:
    """One colour scale for all runs and snapshots, so that maps are comparable."""
    if statistic == "gtd":
        return gtd_scale()
    values = [
        v for run in runs for snapshot in run.health for v in _cells(snapshot, statistic) if v is not None
    ]
    most = max((abs(value) for value in values), default=0.0) or 1.0
    if statistic == STRENGTHS:
        ticks = [(-most, f"low {most:.2g}"), (0.0, "0"), (most, f"high {most:.2g}")]
        return _heat_map(statistic, (-most, most), SIGNED_SCALES, ticks)
    ticks = [(0.0, "0"), (most, shown(most, 2))]
    if statistic == "sink_mass" and most > SINK_FROM:
        ticks.insert(1, (SINK_FROM, f"{SINK_FROM:g}<br>sink above"))
    largest = max((snapshot.largest_entropy or 0.0 for run in runs for snapshot in run.health), default=0.0)
    if statistic == "attention_entropy" and 0 < COLLAPSED_BELOW * largest < most:
        limit = COLLAPSED_BELOW * largest
        ticks.insert(1, (limit, f"{shown(limit, 2)}<br>localised below"))
    limits = ((SINK_FROM,) if statistic == "sink_mass" else (), ())
    return _heat_map(statistic, (0.0, most), AMOUNT_SCALES, ticks, limits)


def _heat_map(
    statistic: str,
    extent: tuple[float, float],
    colours: tuple[Stops, Stops],
    ticks: Sequence[tuple[float, str]],
    limits: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> dict[str, Any]:
    """``limits``: thresholds of verdicts; a cell shows on which side of them its value lies."""
    light, dark = ([list(stop) for stop in stops] for stops in colours)
    return (
        _graph_objects()
        .Heatmap(
            zmin=extent[0],
            zmax=extent[1],
            colorscale=light,
            meta={"dark": dark, "limits": {"from": list(limits[0]), "upTo": list(limits[1])}},
            colorbar={
                "tickvals": [value for value, _ in ticks],
                "ticktext": [text for _, text in ticks],
                "thickness": 10,
                "outlinewidth": 0,
                "len": 1,
                "y": 0.5,
                "x": 1.01,
                "xpad": 4,
                "ypad": 0,
            },
            xgap=2,
            ygap=2,
            hoverongaps=False,
            hovertemplate=f"layer %{{y}}, head %{{x}}<br>{_as_text(title_of(statistic))} %{{z:.3f}}"
            "<br>%{customdata}<extra></extra>",
        )
        .to_plotly_json()
    )


def map_layout(rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Layers down, heads across; numbers stand in the cells of ``rows`` where there is room for them."""
    heads = max(map(len, rows))
    axis = {"fixedrange": True, "showgrid": False, "zeroline": False, "ticks": ""}
    layout = _graph_objects().Layout(
        height=46 + max(138, ROW_HEIGHT * len(rows)),
        margin={"l": 34, "r": 82, "t": 6, "b": 38},
        dragmode=False,
        xaxis={
            **axis,
            "title": {"text": "head", "standoff": 4},
            "dtick": 1 if heads <= NUMBERS_UP_TO else 4,
            "range": [-0.5, heads - 0.5],
        },
        yaxis={
            **axis,
            "title": {"text": "layer", "standoff": 4},
            "dtick": 1 if len(rows) <= 24 else 4,
            "range": [len(rows) - 0.5, -0.5],
        },
    )
    return layout.to_plotly_json()


def last_values(figure: Figure) -> list[tuple[int, str, str]]:
    """Index, name and last value of each line, for the text below the chart; a dash if it is not finite."""
    ends = [(trace["meta"], trace["y"]) for trace in figure["data"]]
    return [(meta["place"], meta["name"], shown(values[-1])) for meta, values in ends if values]


def _figure(name: str, title: str, traces: list[dict[str, Any]], layout: dict[str, Any]) -> Figure:
    return {"id": name, "title": title, "data": traces, "layout": layout}


def _cells(snapshot: Snapshot, statistic: str) -> list[float | None]:
    grid = snapshot.strengths if statistic == STRENGTHS else snapshot.statistics.get(statistic)
    return [value for row in grid or [] for value in row]


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _as_text(words: str) -> str:
    """Escape text for plotly, which interprets some tags and ``%`` placeholders."""
    return escape(words, quote=False).replace("%", "&#37;")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _graph_objects() -> Any:
    """Plotly's classes, which raise on unknown attributes."""
    try:
        import plotly.graph_objects
    except ModuleNotFoundError:
        raise MissingPlotlyError from None
    return plotly.graph_objects

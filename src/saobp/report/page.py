"""One self-contained HTML file: text, tables, figures for plotly, plotly itself, style, script.

Text and tables are rendered here, so they need no script. A content security policy names the hashes of the
page's script and of plotly, so nothing else runs, and forbids every request, whatever the data holds. The
size is limited, so that a page can be mailed: of its 6 MB, plotly takes 2, curves and maps of heads at most
about as much again. The explorer has the rest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, Template

from saobp.metrics.diagnosis.head_names import MARKS
from saobp.metrics.functional.gtd import BETA
from saobp.metrics.health.verdicts import (
    COLLAPSED_BELOW,
    DIFFUSE_ABOVE,
    EVEN_ABOVE,
    HEALTHY_FROM,
    HEALTHY_TO,
    LOCALISED_BELOW,
    SINK_FROM,
    SPREAD_FROM,
    full_odds,
)
from saobp.report.charts import curve_figures, gtd_scale, head_figures, last_values, map_layout
from saobp.report.curves import AXES
from saobp.report.opening import opening
from saobp.report.page_assets import joined_script, plotly_library, read_asset, source_of
from saobp.report.run_view import Run, read_runs
from saobp.report.snapshots import VERDICTS
from saobp.report.summaries import TERMS, summary
from saobp.report.tables import PageTable, fact_tables, head_table
from saobp.storage.atomic import write_atomically
from saobp.version import __version__

PAGE_BYTES = 6_000_000
LIMITS = {
    "localised": LOCALISED_BELOW,
    "healthyFrom": HEALTHY_FROM,
    "healthyTo": HEALTHY_TO,
    "diffuse": DIFFUSE_ABOVE,
    "sink": SINK_FROM,
    "collapsed": COLLAPSED_BELOW,
    "spread": SPREAD_FROM,
    "even": EVEN_ABOVE,
    "fullOdds": full_odds(),
    "beta": BETA,
}


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    explorer: dict[str, Any] | None = None,
    title: str | None = None,
    tables: Sequence[PageTable] = (),
    sample: str | None = None,
    styles: Sequence[tuple[str, str, int]] = (),
    max_bytes: int = PAGE_BYTES,
) -> Path:
    """Write the page of some run folders to ``out``.

    explorer: result of :func:`explorer_data`, in addition to any explorer.json in the folders
    tables:   shown first, for instance the tables of a reproduction
    sample:   a text to quote, for instance the first that was measured
    styles:   light colour, dark colour and dash of each run, at most eight
    """
    read = read_runs(runs)
    if styles:
        read = [
            replace(run, colours=(light, dark), dash=dash)
            for run, (light, dark, dash) in zip(read, styles, strict=True)
        ]
    page = render(read, explorer=explorer, title=title, tables=tables, sample=sample, max_bytes=max_bytes)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.encode(errors="replace").decode())
    return out


def render(
    runs: Sequence[Run],
    *,
    explorer: dict[str, Any] | None = None,
    title: str | None = None,
    tables: Sequence[PageTable] = (),
    sample: str | None = None,
    live: dict[str, Any] | None = None,
    max_bytes: int = PAGE_BYTES,
) -> str:
    """The page as text; ``live``: limits of a server that runs typed sentences, if there is one."""
    explorers = [(run.name, run.explorer) for run in runs if run.explorer is not None]
    if explorer is not None:
        explorers.append((str(explorer["subject"]), explorer))
    drawn = thinned(runs)
    data = script_data(drawn)
    series = [curve for run in drawn for curves in run.curves.values() for curve in curves]
    context = {
        "title": title or _title(runs),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "opening": opening(runs),
        "runs": [{"run": run, "words": summary(run), "facts": dict(run.facts)} for run in runs],
        "head_tables": [head_table(run) for run in runs if run.health],
        "facts": fact_tables(runs),
        "axes": [axis for axis in AXES if any(axis in curve.axes for curve in series)],
        "longest": max((curve.thinned or 0 for curve in series), default=0),
        "tables": tables,
        "sample": sample,
        "live": live,
        "notes": [],
        "colours": _own_colours(runs),
    }
    frame = len(_filled(context, {**data, "explorers": []}, bool(explorers)).encode(errors="replace"))
    if frame > max_bytes:
        raise ValueError(
            f"a page of these {len(runs)} runs would have {frame / 1e6:.1f} MB and may have "
            f"{max_bytes / 1e6:.1f}: report fewer at a time"
        )
    bytes_each = (max_bytes - frame - 20_000) // max(1, len(explorers))
    if explorers and bytes_each <= 0:
        context["notes"] = ["The scores of the explorer are left out; they would make the page too large."]
        explorers = []
    data["explorers"] = [explored(fitted(scores, bytes_each), name) for name, scores in explorers]
    return _filled(context, data, bool(explorers))


def script_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Data of the script except the explorers (see ``types.js``)."""
    return {
        "curves": curve_figures(runs),
        "heads": head_figures(runs) if any(run.health for run in runs) else None,
        "gtd": gtd_scale(),
        "verdicts": list(VERDICTS),
        "marks": MARKS,
        "terms": TERMS,
        "limits": LIMITS,
    }


def explored(explorer: dict[str, Any], run: str) -> dict[str, Any]:
    """An explorer as the script reads it: with its name, and the layout of the head overview."""
    return {**explorer, "run": run, "layout": map_layout(explorer["sentences"][0]["scores"])}


def _own_colours(runs: Sequence[Run]) -> str:
    """CSS for runs with colours of their own."""
    coloured = [(index, run.colours) for index, run in enumerate(runs) if run.colours is not None]
    light, dark = ("".join(f"--run-{index}: {pair[side]}; " for index, pair in coloured) for side in (0, 1))
    if not coloured:
        return ""
    return (
        f':root {{ {light}}}\n:root[data-theme="dark"] {{ {dark}}}\n'
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark}}} }}\n'
    )


def _title(runs: Sequence[Run]) -> str:
    names = ", ".join(run.name for run in runs[:3]) + (", …" if len(runs) > 3 else "")
    return f"Attention report: {names}" if runs else "Attention explorer"


def _filled(words: dict[str, Any], data: dict[str, Any], has_explorer: bool) -> str:
    script, library = joined_script(), plotly_library()
    connect = "'self'" if words["live"] else "'none'"
    policy = (
        f"default-src 'none'; script-src {source_of(script.encode())} {library.source}; "
        "style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return _template().render(
        **words,
        curves=data["curves"],
        heads=data["heads"],
        limits=LIMITS,
        has_explorer=has_explorer or bool(words["live"]),
        policy=policy,
        style=read_asset("style.css"),
        notices=read_asset("notices.txt"),
        script=script,
        library=library.packed,
        data=_embedded({**data, "live": words["live"]}),
    )


@functools.cache
def _template() -> Template:
    pages = Environment(autoescape=True, loader=FunctionLoader(read_asset), trim_blocks=True)
    pages.filters["last_values"] = last_values
    pages.globals["terms"] = TERMS
    return pages.get_template("template.html")


def _embedded(data: dict[str, Any]) -> str:
    """JSON escaped for a script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


POINTS, ALL_POINTS = 600, 40_000
"""Most points of one curve, about a screen's resolution, and of all curves together."""
SNAPSHOTS, ALL_CELLS = 60, 180_000
"""Most snapshots of training at which all heads are shown, and most numbers in all of their maps together."""


def thinned(runs: Sequence[Run]) -> list[Run]:
    """The runs downsampled to the limits of a page; the last snapshot always stays."""
    curves = sum(len(series) for run in runs for series in run.curves.values())
    points = max(24, min(POINTS, ALL_POINTS // max(1, curves)))
    cells = sum(run.health[-1].cells for run in runs if run.health)
    snapshots = max(2, min(SNAPSHOTS, ALL_CELLS // max(1, cells)))
    return [
        replace(
            run,
            curves={name: [curve.thin(points) for curve in series] for name, series in run.curves.items()},
            health=_spread(run.health, snapshots),
        )
        for run in runs
    ]


def _spread(entries: list[Any], most: int) -> list[Any]:
    if len(entries) <= most:
        return entries
    return [entries[round(index * (len(entries) - 1) / (most - 1))] for index in range(most)]


def fitted(explorer: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    """The first sentences whose scores fit into ``max_bytes``; of a single long one, some of its layers.

    ``left_out`` notes what was dropped.
    """
    sizes = [_size(sentence["scores"]) for sentence in explorer["sentences"]]
    kept, used = 0, 0
    while kept < len(sizes) and used + sizes[kept] <= max_bytes:
        used += sizes[kept]
        kept += 1
    sentences, notes = explorer["sentences"][:kept], list(explorer["left_out"])
    if kept < len(sizes) and kept:
        notes.append(
            f"Of {len(sizes)} sentences the first {kept} are here; the rest would make the page too large."
        )
    if not kept:
        first = explorer["sentences"][0]
        layers = len(first["scores"])
        count = max(1, int(layers * max_bytes / sizes[0]))
        chosen = {round(index * (layers - 1) / max(1, count - 1)) for index in range(count)}
        scores = [own if layer in chosen else [None] * len(own) for layer, own in enumerate(first["scores"])]
        sentences = [{**first, "scores": _trimmed(scores, max_bytes)}]
        heads = sum(head is not None for own in sentences[0]["scores"] for head in own)
        total = sum(len(own) for own in first["scores"])
        notes.append(
            f"The scores of {heads} of {total} heads on one sentence are here; "
            "more would make the page too large."
        )
    return {**explorer, "sentences": sentences, "left_out": notes}


def _trimmed(scores: list[list[Any]], max_bytes: int) -> list[list[Any]]:
    """Drop heads that do not fit; the first one stays."""
    used, trimmed = 0, []
    for layer in scores:
        row = []
        for head in layer:
            size = 0 if head is None else len(head["codes"])
            row.append(head if used == 0 or used + size <= max_bytes else None)
            used += size if row[-1] is not None else 0
        trimmed.append(row)
    return trimmed


def _size(scores: list[list[Any]]) -> int:
    return sum(len(head["codes"]) + 64 for layer in scores for head in layer if head is not None)

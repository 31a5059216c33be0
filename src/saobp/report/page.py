"""One HTML file with everything inside: data, style and script.

Curves and heat maps are drawn by the page's own few hundred lines of SVG, canvas and tables. The bundle that
plotly's Python package ships is 4.8 MB: of the 6 MB a page may have it would leave little for scores, take a
second to start on a phone, and still lack tables for screen readers, reading by keyboard, colours that follow
the reader's scheme, and the live maps. A content security policy names the hashes of the one script and the
one style, so nothing else runs and nothing is fetched, whatever the data holds.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment

from saobp import __version__
from saobp.metrics.figures import TITLES
from saobp.metrics.gtd import BETA
from saobp.metrics.verdict import (
    COLLAPSED_BELOW,
    DIFFUSE_ABOVE,
    HEALTHY_FROM,
    HEALTHY_TO,
    LOCALISED_BELOW,
    SINK_FROM,
)
from saobp.report.budget import fitted, thinned
from saobp.report.runs import Run, read_runs
from saobp.report.script import joined_script, read_asset
from saobp.report.snapshots import VERDICTS
from saobp.report.words import MEANINGS, fact_text, summary

PAGE_BYTES = 6_000_000


@dataclass(frozen=True)
class Table:
    """A table that the caller wants at the top of the page: numbers or text, as they are to be read."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    explorer: dict[str, Any] | None = None,
    title: str | None = None,
    tables: Sequence[Table] = (),
    sample: str | None = None,
    max_bytes: int = PAGE_BYTES,
) -> Path:
    """Write the page of some run folders to ``out``.

    explorer: what :func:`explorer_data` returned, beside the explorer.json that a folder may hold
    tables:   shown first, for instance the tables of a reproduction
    sample:   a text to quote, for instance the first that was measured
    """
    read = read_runs(runs)
    page = render(read, explorer=explorer, title=title, tables=tables, sample=sample, max_bytes=max_bytes)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8", errors="replace")
    return out


def render(
    runs: Sequence[Run],
    *,
    explorer: dict[str, Any] | None = None,
    title: str | None = None,
    tables: Sequence[Table] = (),
    sample: str | None = None,
    live: dict[str, Any] | None = None,
    max_bytes: int = PAGE_BYTES,
) -> str:
    """The page as text; ``live`` tells it that a server answers typed sentences, and its limits."""
    data = page_data(runs, title=title, tables=tables, sample=sample, live=live)
    explorers = [(run.name, run.explorer) for run in runs if run.explorer is not None]
    if explorer is not None:
        explorers.append((str(explorer["subject"]), explorer))
    frame = len(_filled(data).encode(errors="replace"))
    if frame > max_bytes:
        raise ValueError(
            f"a page of these {len(runs)} runs would have {frame / 1e6:.1f} MB and may have "
            f"{max_bytes / 1e6:.1f}: report fewer at a time"
        )
    room = (max_bytes - frame - 20_000) // max(1, len(explorers))
    if explorers and room <= 0:
        data["notes"].append("The scores of the explorer are left out; they would make the page too large.")
        explorers = []
    data["explorers"] = [{**fitted(own, room), "run": name} for name, own in explorers]
    return _filled(data)


def page_data(
    runs: Sequence[Run],
    *,
    title: str | None,
    tables: Sequence[Table],
    sample: str | None,
    live: dict[str, Any] | None,
) -> dict[str, Any]:
    """Everything but the explorers, as the script reads it (``types.js`` describes it)."""
    named = ", ".join(run.name for run in runs[:3]) + (", …" if len(runs) > 3 else "")
    return {
        "title": title or (f"Attention report: {named}" if runs else "Attention explorer"),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "runs": [_run(run) for run in thinned(runs)],
        "tables": [
            {
                "title": own.title,
                "columns": list(own.columns),
                "rows": [list(row) for row in own.rows],
                "note": own.note,
            }
            for own in tables
        ],
        "sample": sample,
        "notes": [],
        "live": live,
        "explorers": [],
        "titles": TITLES,
        "verdicts": list(VERDICTS),
        "meanings": MEANINGS,
        "limits": {
            "localised": LOCALISED_BELOW,
            "healthyFrom": HEALTHY_FROM,
            "healthyTo": HEALTHY_TO,
            "diffuse": DIFFUSE_ABOVE,
            "sink": SINK_FROM,
            "collapsed": COLLAPSED_BELOW,
            "beta": BETA,
        },
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "kind": run.kind,
        "words": summary(run),
        "problems": run.problems,
        "curves": {name: [one.to_dict() for one in series] for name, series in run.curves.items()},
        "health": [snapshot.to_dict() for snapshot in run.health],
        "facts": _texts(run.facts),
        "recipe": _texts(run.recipe),
        "result": _texts(run.result),
    }


def _texts(facts: Sequence[tuple[str, Any]]) -> list[list[str]]:
    return [[name, fact_text(value)] for name, value in facts]


def _filled(data: dict[str, Any]) -> str:
    style, script = read_asset("style.css"), joined_script()
    connect = "'self'" if data["live"] else "'none'"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return (
        Environment(autoescape=True, keep_trailing_newline=True)
        .from_string(read_asset("template.html"))
        .render(title=data["title"], policy=policy, style=style, script=script, data=_embedded(data))
    )


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

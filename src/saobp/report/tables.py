"""Tables of the page, as rows of text for the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saobp.report.charts import STRENGTHS, strength_title, title_of
from saobp.report.run_view import Run
from saobp.report.summaries import NONE, fact_text, shown

SMALLEST_ERROR = 0.0005


@dataclass(frozen=True)
class PageTable:
    """A table at the top of the page, cells formatted by the caller."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def fact_tables(runs: Sequence[Run]) -> list[PageTable]:
    """Facts, results and recipes with the runs as columns; rows without any value are dropped."""
    parts = [
        _by_run("Runs", runs, [run.facts for run in runs]),
        _by_run("Results", runs, [run.result for run in runs]),
        _by_run("The full recipe", runs, [run.recipe for run in runs]),
    ]
    return [part for part in parts if part.rows]


def _by_run(title: str, runs: Sequence[Run], facts: Sequence[Sequence[tuple[str, Any]]]) -> PageTable:
    """A table with runs as columns; rows in order of first appearance."""
    having = [(run.name, dict(run_facts)) for run, run_facts in zip(runs, facts, strict=True) if run_facts]
    names = dict.fromkeys(name for run_facts in facts for name, _ in run_facts)
    rows = [
        [
            _readable(name),
            *(fact_text(run_facts[name]) if name in run_facts else NONE for _, run_facts in having),
        ]
        for name in names
    ]
    return PageTable(title, ["", *(name for name, _ in having)], rows)


def _readable(name: str) -> str:
    """Names of nested fields in words; names of data unchanged."""
    return name if name.startswith("data: ") else name.replace(".", " · ").replace("_", " ")


def head_table(run: Run) -> PageTable:
    """Every head of a run at the last step it was measured, with standard errors where they are known."""
    last = run.health[-1]
    grids = {**last.statistics, **({} if last.strengths is None else {STRENGTHS: last.strengths})}

    def cell(name: str, layer: int, head: int) -> str:
        error = last.errors[name][layer][head] if name in last.errors else None
        text = shown(grids[name][layer][head])
        return f"{text} ± {shown(error)}" if error is not None and error >= SMALLEST_ERROR else text

    def kind(layer: int, head: int) -> list[str]:
        return [] if last.kinds is None else [last.kinds[layer][head] or NONE]

    rows = [
        [
            f"{layer}.{head}",
            last.layers[layer],
            word,
            *kind(layer, head),
            *(cell(name, layer, head) for name in grids),
        ]
        for layer, words in enumerate(last.verdicts)
        for head, word in enumerate(words)
    ]
    titles = [strength_title([run]) if name == STRENGTHS else title_of(name) for name in grids]
    when = "" if last.step is None else f", at step {last.step:,}"
    return PageTable(
        f"Every head of {run.name}",
        ["layer.head", "module", "verdict", *([] if last.kinds is None else ["kind"]), *titles],
        rows,
        f"{len(rows):,} head{'' if len(rows) == 1 else 's'}{when}.",
    )

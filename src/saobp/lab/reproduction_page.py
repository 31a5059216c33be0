"""The HTML page of a reproduction: claims, outcomes and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from saobp.lab.method_style import STYLES
from saobp.lab.result_page import ANSWERS
from saobp.lab.statistics import UNDECIDED
from saobp.report.page import write_report
from saobp.report.tables import PageTable
from saobp.sizes import FAMILY_NAMES
from saobp.storage.json_files import read_object

MOST_RUNS = 8
"""Most runs that colours can distinguish on one page."""


def write_reproduction(
    runs: Mapping[Path, str], results: Path, targets: Sequence[str], scale: str, family: str
) -> Path:
    """``report-SCALE-FAMILY.html`` in the results folder: outcomes of some targets, first runs of a family.

    Inconclusive targets come last. Each family has a page, since masked and causal perplexities do not
    compare.
    runs: folders with their methods, whose colours are those of the lab's figures
    """
    decided: list[PageTable] = []
    undecided: list[PageTable] = []
    for target in targets:
        file = results / target / f"{scale}.json"
        if not file.exists():
            continue
        outcome = read_object(file)
        claims = [claim for claim in outcome["claims"] if claim["status"] != "not run"]
        left_out = len(outcome["claims"]) - len(claims)
        notes = [f"{outcome['runs']} runs behind it, {len(outcome['missing'])} missing."]
        if left_out:
            notes.append(f"{left_out} further claims were not run.")
        is_question = outcome["kind"] == "question"
        answers = ANSWERS if is_question else {}
        rows = [
            [claim["words"], answers.get(claim["status"], claim["status"]), claim["detail"]]
            for claim in claims
        ]
        if scale == "smoke":
            notes.append("A smoke run only shows that the code runs; its numbers say nothing.")
        if rows:
            first = ("is it so?", "answer") if is_question else ("claim", "here")
            columns = (*first, "our difference [95 % interval]")
            is_open = all(claim["status"] == UNDECIDED for claim in claims)
            tables = undecided if is_open else decided
            tables.append(PageTable(outcome["title"], columns, rows, " ".join(notes)))
    shown = list(runs)[:MOST_RUNS]
    title = f"Reproduction, {scale} scale, {FAMILY_NAMES[family]}"
    if len(runs) > MOST_RUNS:
        title += f": the first {MOST_RUNS} of {len(runs)} runs"
    styles = _styles([runs[run] for run in shown])
    page = results / f"report-{scale}-{family}.html"
    return write_report(shown, page, title=title, tables=[*decided, *undecided], styles=styles)


def _styles(methods: Sequence[str]) -> list[tuple[str, str, int]]:
    """Colours of each method; further runs of one, as of another seed, are dashed."""
    return [
        (STYLES[key].colour, STYLES[key].on_dark, methods[:place].count(key))
        for place, key in enumerate(methods)
    ]

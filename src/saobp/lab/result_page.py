"""One page of results: the paper's numbers, ours and their difference side by side, with verdicts."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from saobp.lab.cells import (
    format_gain,
    format_means,
    format_spread,
    format_verdict,
    made_on,
    markdown_table,
    paper_digits,
)
from saobp.lab.experiments import Experiment
from saobp.lab.figures import dots, save_figure
from saobp.lab.methods import METHODS
from saobp.lab.scales import Scale
from saobp.lab.statistics import Gain, Status, answer_status, claim_status, paired_gain, spread
from saobp.storage.atomic import write_atomically
from saobp.storage.json_files import write_json

SMOKE = (
    "**Smoke run: tiny models on made-up or little text. The numbers only show that the code runs; "
    "they say nothing about any method.**"
)
HEADERS = (
    "measure",
    "method",
    "paper",
    "ours",
    "ours - paper",
    "paper, method - base",
    "ours, method - base [95 % interval]",
    "verdict",
)
PAPER_COLUMNS = (2, 4, 5)
"""Columns dropped where the paper has no numbers."""
PARTIAL = (
    "\\* Only a part of the training examples, or stand-ins for those of validation, is available. "
    "Methods compare with each other there; the paper's scores are of another training set and "
    "are left out."
)
LISTED = 12
"""Missing runs listed by name; the rest are counted."""

ANSWERS: dict[Status, str] = {"reproduces": "yes", "does not reproduce": "no", "not shown": "no gain shown"}
"""Status of a question as an answer."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper or an open question, and its outcome here."""

    words: str
    status: Status
    detail: str


class Page:
    """Collects the contents of a page and writes it."""

    def __init__(self, experiment: Experiment, scale: Scale) -> None:
        self.experiment, self.scale = experiment, scale
        self.blocks: list[str] = []
        self.claims: list[Claim] = []
        self.figures: dict[str, Figure] = {}
        self.lines: list[list[str]] = []
        self.is_filled = False

    @property
    def has_results(self) -> bool:
        """Whether there is a number, and one for a claim if the page has claims."""
        decided = [claim for claim in self.claims if claim.status != "not run"]
        return self.is_filled and bool(decided or not self.claims)

    def text(self, text: str) -> None:
        self.blocks.append(text)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.blocks.append(markdown_table(headers, rows))

    def figure(self, name: str, figure: Figure, caption: str, alternative: str = "") -> None:
        file = f"{self.scale.name}-{name}"
        self.figures[file] = figure
        self.is_filled = True
        self.blocks.append(f"![{alternative or caption}]({file}.svg)\n\n{caption}")

    def dots(
        self,
        name: str,
        measures: Mapping[str, Mapping[str, Mapping[int, float]]],
        caption: str,
        paper: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """A dot plot of every seed by measure and method, if any; its alt text has the means."""
        if any(any(methods.values()) for methods in measures.values()):
            alternative = f"{caption} Means: {format_means(measures)}."
            self.figure(name, dots(measures, paper), caption, alternative)

    def compare(
        self,
        measure: str,
        values: Mapping[str, Mapping[int, float]],
        paper: Mapping[str, float] | None = None,
        *,
        base: str = "original",
        higher_is_better: bool = True,
        digits: int = 2,
        partial: bool = False,
        claims: Collection[str] = (),
        methods: Sequence[str] | None = None,
        same_size: bool = True,
    ) -> dict[str, Gain | None]:
        """Rows of the comparison table for one metric; paired gains over ``base`` by seed.

        paper: its numbers by method; for a partial task only gains are shown, not scores
        same_size: whether the magnitude of the paper's differences is comparable too, or only their sign
        claims:  methods whose gain over the base the paper claims
        methods: rows, including those without values; by default the experiment's of BERT, else of GPT-2
        """
        paper = paper or {}
        theirs_to = paper_digits(paper.values(), digits)
        arrow = f"{measure}{' *' if partial else ''} {'↑' if higher_is_better else '↓'}"
        gains: dict[str, Gain | None] = {}
        rows = methods or self.experiment.bert or self.experiment.gpt2
        if any(values.values()):
            self.is_filled = True
        else:
            self.lines.append([measure, "every method", "", "not run", *[""] * (len(HEADERS) - 4)])
        for method in rows:
            by_seed = values.get(method, {})
            is_base = method == base
            gain = (
                None
                if is_base
                else paired_gain(by_seed, values.get(base, {}), higher_is_better=higher_is_better)
            )
            gains[method] = gain
            theirs = paper.get(method)
            their_gain = None if theirs is None or is_base or base not in paper else theirs - paper[base]
            ours = spread(by_seed.values())
            printed = None if partial else theirs
            if any(values.values()):
                line = [
                    arrow,
                    METHODS[method].title,
                    "" if printed is None else f"{printed:.{theirs_to}f}",
                    format_spread(ours, digits),
                    "" if printed is None or ours is None else f"{ours.mean - printed:+.{digits}f}",
                    "" if their_gain is None else f"{their_gain:+.{theirs_to}f}",
                    format_gain(gain, digits),
                    "" if is_base else format_verdict(gain, ours),
                ]
                self.lines.append(line)
            if method in claims and their_gain is not None:
                status = claim_status(their_gain, gain, same_size=same_size and not partial)
                pair = f"{METHODS[method].title} against {METHODS[base].title}"
                mark = " *" if partial else ""
                words = f"{pair}, {measure}{mark}: the paper has {their_gain:+.{theirs_to}f}"
                self.claim(words, status, gain, digits)
        return gains

    def compared(self) -> None:
        """Write the comparison table that ``compare`` has filled."""
        marked = PARTIAL if any("*" in line[0] for line in self.lines) else ""
        empty = not any(line[column] for line in self.lines for column in PAPER_COLUMNS)
        columns = [index for index in range(len(HEADERS)) if not (empty and index in PAPER_COLUMNS)]
        self.table([HEADERS[index] for index in columns], [[line[p] for p in columns] for line in self.lines])
        self.lines = []
        if marked:
            self.text(marked)

    def claim(self, words: str, status: Status, gain: Gain | None, digits: int = 2, detail: str = "") -> None:
        """Record a claim with our difference; ``detail`` describes it where it is a mean over seeds."""
        if gain is None:
            self.claims.append(Claim(words, status, "no pair of runs"))
            return
        unit = "seed" if detail else "pair"
        difference = f"{format_gain(gain, digits)} ({gain.pairs} {unit}{'s' if gain.pairs > 1 else ''})"
        self.claims.append(Claim(words, status, f"{detail} {difference}".strip()))

    def answer(self, words: str, gain: Gain | None, digits: int = 2) -> None:
        """Record the answer to whether something is better; 'reproduces' means yes."""
        self.claim(words, answer_status(gain), gain, digits)

    def write(self, out: Path, records: list[dict[str, Any]], missing: Sequence[str]) -> list[Path]:
        """``SCALE.md``, its figures, ``SCALE-runs.json`` and ``SCALE.json`` in the target's folder.

        The text of ``SCALE-notes.md``, if somebody wrote one, is put after the results.
        """
        folder, name = out / self.experiment.name, self.scale.name
        folder.mkdir(parents=True, exist_ok=True)
        for file, figure in self.figures.items():
            save_figure(figure, folder / file)
        head = [f"# {self.experiment.title} ({name})", *([SMOKE] if name == "smoke" else [])]
        asks = "The question" if self.experiment.kind in ("question", "arena") else "The paper"
        head += [f"{asks}: {self.experiment.asks}", *self._claim_table()]
        notes = folder / f"{name}-notes.md"
        tail = [notes.read_text(encoding="utf-8").strip()] if notes.exists() else []
        tail += [_missing(missing)] if missing else []
        tail += [made_on(records), f"The record of every run: [{name}-runs.json]({name}-runs.json)."]
        page = folder / f"{name}.md"
        write_atomically(page, "\n\n".join([*head, *self.blocks, *tail]) + "\n")
        outcome = {
            "target": self.experiment.name,
            "kind": self.experiment.kind,
            "title": self.experiment.title,
            "scale": name,
            "runs": len(records),
            "missing": list(missing),
            "claims": [asdict(claim) for claim in self.claims],
        }
        write_json(folder / f"{name}.json", outcome)
        lines = ",\n".join(json.dumps(record) for record in records)
        write_atomically(folder / f"{name}-runs.json", f"[\n{lines}\n]\n")
        return [page]

    def _claim_table(self) -> list[str]:
        if not self.claims:
            return []
        answers = ANSWERS if self.experiment.kind == "question" else {}
        rows = [[claim.words, answers.get(claim.status, claim.status), claim.detail] for claim in self.claims]
        return [markdown_table(("claim", "here", "our difference [95 % interval]"), rows)]


def _missing(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"Without a finished record: {', '.join(names[:LISTED])}{more}."

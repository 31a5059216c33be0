"""A table of measurements: shown in the terminal, written as Markdown and CSV, drawn as PNG."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from saobp.storage.atomic import write_atomically
from saobp.timing import Failure, Result, Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cell = str | int | float | None


@dataclass
class BenchmarkTable:
    """Rows of measurements, with a header of facts."""

    name: str
    title: str
    facts: dict[str, str]
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Cell]] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        """Every column that some row has, in order of first appearance."""
        return list(dict.fromkeys(column for row in self.rows for column in row))

    def show(self, console: Console) -> None:
        shown = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for column in self.columns:
            shown.add_column(column)
        for row in self.rows:
            shown.add_row(*(text(row.get(column)) for column in self.columns))
        console.print(shown)
        for note in self.notes:
            console.print(note, soft_wrap=True)

    def markdown(self) -> str:
        lines = [f"# {self.title}", "", *(f"- {fact}: {value}" for fact, value in self.facts.items()), ""]
        lines += [f"| {' | '.join(self.columns)} |", f"|{'---|' * len(self.columns)}"]
        for row in self.rows:
            cells = (text(row.get(column)).replace("|", "\\|") for column in self.columns)
            lines.append(f"| {' | '.join(cells)} |")
        if self.notes:
            lines += ["", *(f"{note}\n" for note in self.notes)]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, folder: Path) -> list[Path]:
        """Markdown and CSV, in full precision, under the table's name; the facts are comments in the CSV."""
        folder.mkdir(parents=True, exist_ok=True)
        page, data = folder / f"{self.name}.md", folder / f"{self.name}.csv"
        write_atomically(page, self.markdown())
        lines = io.StringIO()
        lines.writelines(f"# {fact}: {value}\n" for fact, value in self.facts.items())
        writer = csv.DictWriter(lines, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(data, lines.getvalue())
        return [page, data]

    def draw(self, path: Path, x: str, series: Sequence[str], by: Sequence[str], label: str) -> Path:
        """One panel for each value of the ``by`` columns, one line per column in ``series``."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        panels = list(dict.fromkeys(tuple(text(row.get(name)) for name in by) for row in self.rows))
        figure, axes = pyplot.subplots(
            1, max(1, len(panels)), figsize=(4.5 * max(1, len(panels)), 3.6), squeeze=False, sharey=True
        )
        for axis, panel in zip(axes[0], panels, strict=False):
            rows = [row for row in self.rows if tuple(text(row.get(name)) for name in by) == panel]
            for column in series:
                points = [
                    (row[x], value) for row in rows if isinstance(value := row.get(column), float | int)
                ]
                if points:
                    axis.plot([str(p[0]) for p in points], [p[1] for p in points], marker="o", label=column)
                    for place, value in points:
                        axis.annotate(
                            text(value),
                            (str(place), value),
                            xytext=(0, 5),
                            textcoords="offset points",
                            ha="center",
                            fontsize=7,
                        )
            axis.set_title(
                ", ".join(_panel_title(name, value) for name, value in zip(by, panel, strict=True))
            )
            axis.set_xlabel(x)
            axis.axhline(1.0, color="grey", linewidth=0.8)
            if len(series) > 1 and axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8)
            axis.margins(x=0.1)
        drawn = [row.get(column) for row in self.rows for column in series]
        _scale(axes[0][0], [value for value in drawn if isinstance(value, float | int)])
        axes[0][0].set_ylabel(label)
        figure.suptitle(f"{self.title} ({self.facts.get('GPU', self.facts.get('CPU', ''))})", fontsize=9)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return path


def _panel_title(column: str, value: str) -> str:
    """A panel's value in words; a boolean or a number with its column name."""
    if value.isdecimal():
        return f"{column} {value}"
    return {"yes": f"with {column}", "no": f"without {column}"}.get(value, value)


def _scale(axis: Axes, values: Sequence[float]) -> None:
    """From 0 for values of similar magnitude; else logarithmic, with plain tick labels."""
    from matplotlib.ticker import NullLocator

    if not values or min(values) <= 0 or max(values) / min(values) < 4:
        axis.set_ylim(0, 1.15 * max([1.0, *values]))
        return
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylim(min([1.0, *values]) / 1.3, max(values) * 1.5)


def text(cell: Cell) -> str:
    """Three significant digits for numbers, a dash for nothing."""
    if cell is None or cell == "":
        return "-"
    return f"{cell:.3g}" if isinstance(cell, float) and abs(cell) < 1000 else _plain(cell)


def _plain(cell: str | int | float) -> str:
    return f"{cell:.0f}" if isinstance(cell, float) else str(cell)


def milliseconds(result: Result | None) -> Cell:
    """Median of a timing, the reason of a failure, None if not run."""
    if result is None:
        return None
    return result.median if isinstance(result, Timing) else result.reason


def ratio(result: Result | None, base: Result | None) -> float | None:
    """How many times as long as ``base``, where both could be timed."""
    if isinstance(result, Timing) and isinstance(base, Timing):
        return result.over(base)
    return None


def spread(result: Result | None) -> Cell:
    """Spread of a timing in per cent."""
    return None if result is None or isinstance(result, Failure) else 100 * result.spread

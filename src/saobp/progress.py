"""Progress of long work, the same in all commands: bars on a terminal, elsewhere occasional lines."""

from __future__ import annotations

from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

PLAIN_SECONDS = 60.0
"""Seconds between plain lines, and before the first: short work prints none."""


class OccasionalLines:
    """Prints lines: each on a terminal, elsewhere the latest once a minute."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._last_line = monotonic()

    def __call__(self, sentence: str) -> None:
        now = monotonic()
        if self.console.is_terminal or now - self._last_line >= PLAIN_SECONDS:
            self._last_line = now
            self.console.print(Text(sentence), soft_wrap=True)


class ProgressBars:
    """Bars on stderr, cleared when the block ends. Text printed to the same console appears above them."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._line = OccasionalLines(self.console)

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def add(self, description: str) -> ProgressBar:
        return ProgressBar(self, description)

    def _print_line(self, description: str, done: float, total: float, note: str) -> None:
        if not self.console.is_terminal:
            self._line(f"{description}: {done / max(total, 1):.0%}" + (f", {note}" if note else ""))


class ProgressBar:
    """One bar, called with what is done and the total."""

    def __init__(self, bars: ProgressBars, description: str) -> None:
        self._all, self._description = bars, description
        self._task = bars._bars.add_task(escape(description), total=None, note="")

    def __call__(self, done: float, total: float, note: str = "") -> None:
        self._all._bars.update(self._task, completed=done, total=total, note=escape(note))
        self._all._print_line(self._description, done, total, note)

"""Progress bars for the work before training, one line for each piece of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


@contextmanager
def text_bars(console: Console) -> Iterator[Callable[[str], Callable[[int, int], object]]]:
    """Meanwhile, what is given words shows a bar with them, and gives back what is told how far it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def bar_of(words: str) -> Callable[[int, int], object]:
            task = bars.add_task(escape(words), total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield bar_of

"""A work queue shared by several processes: each takes the first unclaimed item."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from saobp.storage.atomic import first_line
from saobp.storage.locks import try_lock

Notify = Callable[[str], object]

CLAIMS = ".claims"


@dataclass(frozen=True)
class WorkItem:
    """A unit of work, run once.

    is_done:       whether its result is there
    missing_model: the name of a model that it needs and that is missing; else empty
    """

    name: str
    is_done: Callable[[], bool]
    run: Callable[[], object]
    missing_model: Callable[[], str] = lambda: ""


@dataclass
class StageResult:
    """Outcome of each item of a stage, by name; ``waiting`` maps items to the models they wait for."""

    done: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = [f"{len(self.done)} done", f"{len(self.reused)} there already"]
        counts += [f"{len(self.elsewhere)} claimed by other processes"] if self.elsewhere else []
        counts += [f"{len(self.waiting)} without a model"] if self.waiting else []
        counts += [f"{len(self.failed)} failed"] if self.failed else []
        return ", ".join(counts)


@contextmanager
def claimed(runs: Path, name: str) -> Iterator[bool]:
    """Context with whether this process could lock the item; a killed process releases it."""
    folder = runs / CLAIMS
    folder.mkdir(parents=True, exist_ok=True)
    lock = try_lock(folder / name)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def work_through(
    items: Sequence[WorkItem], runs: Path, notify: Notify = print, progress: Notify = print
) -> StageResult:
    """Run the items that are not done, in order; one that fails does not stop the others.

    ``notify`` is called with failures, ``progress`` with every item.
    """
    result = StageResult()
    for number, item in enumerate(items, 1):
        if item.is_done():
            result.reused.append(item.name)
        elif model := item.missing_model():
            result.waiting[item.name] = model
        else:
            with claimed(runs, item.name) as is_mine:
                if not is_mine:
                    result.elsewhere.append(item.name)
                elif item.is_done():  # by another process in the meantime
                    result.reused.append(item.name)
                else:
                    progress(f"[{number}/{len(items)}] {item.name}")
                    _run(item, result, notify)
    return result


def _run(item: WorkItem, result: StageResult, notify: Notify) -> None:
    try:
        item.run()
        result.done.append(item.name)
    except Exception as problem:
        result.failed[item.name] = first_line(problem)
        notify(f"{item.name} failed: {result.failed[item.name]}")
        if not isinstance(problem, (ValueError, OSError)):
            notify(traceback.format_exc())

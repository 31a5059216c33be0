"""How several processes share a list of work: each takes the first piece that no other has taken."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from saobp.lab.clock import Deadline, TimeIsUpError
from saobp.storage.atomic import first_line
from saobp.storage.locks import try_lock

Say = Callable[[str], object]

CLAIMS = ".claims"
LEAST_SECONDS = 45.0
"""A run that cannot end in time is begun if so much time is left; less would go into its preparation."""


@dataclass(frozen=True)
class Piece:
    """Something to do once.

    is_done:      whether its result is there
    lacks:        what it needs and is not there, in a word or two; empty if nothing
    seconds:      how long it is expected to take
    can_continue: whether a part of it is worth doing, because the rest can be done another time
    """

    name: str
    is_done: Callable[[], bool]
    do: Callable[[], None]
    seconds: Callable[[], float]
    lacks: Callable[[], str] = lambda: ""
    can_continue: bool = False


@dataclass
class StageResult:
    """What became of each piece of work of a stage, by name; ``lacking`` names what was not there."""

    done: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{len(self.done)} done", f"{len(self.reused)} there already"]
        words += [f"{len(self.elsewhere)} in the hands of other processes"] if self.elsewhere else []
        words += [f"{len(self.left)} left for want of time"] if self.left else []
        words += [f"{len(self.lacking)} without a model"] if self.lacking else []
        words += [f"{len(self.failed)} failed"] if self.failed else []
        return ", ".join(words)


@contextmanager
def claimed(runs: Path, name: str) -> Iterator[bool]:
    """Whether this process alone has the piece meanwhile; a killed process holds nothing."""
    folder = runs / CLAIMS
    folder.mkdir(parents=True, exist_ok=True)
    lock = try_lock(folder / name)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def work_through(pieces: Sequence[Piece], runs: Path, deadline: Deadline, say: Say = print) -> StageResult:
    """Do what is not done, in order, as far as the time goes; one that fails leaves the others going.

    What would not end in time is passed over, so that something shorter may still be done. If after that
    there is time left, the first of those that can be continued later is begun all the same.
    """
    result, places = StageResult(), {piece.name: place for place, piece in enumerate(pieces, 1)}
    postponed = []
    for piece in pieces:
        if piece.is_done():
            result.reused.append(piece.name)
        elif lack := piece.lacks():
            result.lacking[piece.name] = lack
        elif not deadline.allows(piece.seconds()):
            postponed.append(piece)
        else:
            _do(piece, runs, deadline, result, say, f"[{places[piece.name]}/{len(pieces)}] ")
    for piece in postponed:
        if piece.can_continue and deadline.left > LEAST_SECONDS:
            _do(piece, runs, deadline, result, say, "to be continued another time: ")
        else:
            result.left.append(piece.name)
    return result


def _do(
    piece: Piece, runs: Path, deadline: Deadline, result: StageResult, say: Say, announcement: str
) -> None:
    with claimed(runs, piece.name) as mine:
        if not mine:
            result.elsewhere.append(piece.name)
        elif piece.is_done():
            result.reused.append(piece.name)
        else:
            expected = piece.seconds()
            say(f"{announcement}{piece.name}{f', about {expected:.0f} s' if expected else ''}")
            try:
                with deadline.enforced():
                    piece.do()
                result.done.append(piece.name)
            except TimeIsUpError:
                result.left.append(piece.name)
                say(f"{piece.name} was stopped because the time is up")
            except Exception as problem:
                result.failed[piece.name] = first_line(problem)
                say(f"{piece.name} failed: {result.failed[piece.name]}")
                if not isinstance(problem, (ValueError, OSError)):
                    say(traceback.format_exc())

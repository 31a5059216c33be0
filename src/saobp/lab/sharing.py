"""How work is dealt out to processes, and how long a fine-tuning run is expected to take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

Work = TypeVar("Work")

TASK_WEIGHTS = {
    "sst2": 6300, "hellaswag": 5600, "race-middle": 4800, "mnli": 2800, "qqp": 2100, "squad": 1500,
    "cola": 1300, "qnli": 1200, "stsb": 900, "mrpc": 600, "rte": 400, "wnli": 100,
}  # fmt: skip
"""Steps of a fine-tuning run, weighted by their length; a guess that only balances processes."""
STEP_SECONDS = 0.015
"""Of one such step on a large GPU, until something was measured."""


def share_of(
    work: Sequence[Work], part: int, parts: int, weight: Callable[[Work], float] = lambda _: 1.0
) -> list[Work]:
    """The ``part``-th (from 1) of ``parts`` shares of about equal weight, each in the order of the whole.

    Every process that calls this with the same work gets a share of its own.
    """
    loads, mine = [0.0] * parts, []
    for one in work:
        lightest = loads.index(min(loads))
        loads[lightest] += weight(one)
        if lightest == part - 1:
            mine.append(one)
    return mine


class TaskTimes:
    """Seconds of fine-tuning by task: as last time, else by weight."""

    def __init__(self, step_seconds: float = STEP_SECONDS) -> None:
        self._known: dict[str, float] = {}
        self._step = step_seconds

    def learn(self, task: str, seconds: float) -> None:
        self._known[task] = seconds
        self._step = statistics.median(own / weight_of(name) for name, own in self._known.items())

    def expected(self, task: str) -> float:
        return self._known.get(task, self._step * weight_of(task))


def weight_of(task: str) -> float:
    return TASK_WEIGHTS.get(task, 1000)

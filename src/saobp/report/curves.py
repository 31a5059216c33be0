"""Curves of a run, downsampled so that the page stays small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from saobp.runs.tolerant_reader import number

AXES = ("step", "tokens", "seconds")
NOT_DRAWN = (*AXES, "epoch")


@dataclass(frozen=True)
class Curve:
    """One curve: values over steps, with tokens and seconds where logged.

    ``of`` names the seed in a run with several; ``thinned``, if not None, is the original number of points.
    """

    of: str
    axes: dict[str, list[float | None]]
    values: list[float | None]
    thinned: int | None = None

    def thin(self, most: int) -> Curve:
        """Downsample to at most so many points, keeping local extremes."""
        if len(self.values) <= most:
            return self
        indices = _extremes(self.values, most)
        axes = {name: [values[index] for index in indices] for name, values in self.axes.items()}
        return Curve(self.of, axes, [self.values[index] for index in indices], len(self.values))


def read_curves(lines: Sequence[dict[str, Any]], of: str = "") -> dict[str, list[Curve]]:
    """A curve for every quantity that ``metrics.jsonl`` holds, in the order in which they appear.

    Non-finite values are gaps. Evaluation lines have no tokens or seconds, so they take those of the line
    before.
    """
    points: dict[str, list[tuple[dict[str, float | None], float | None]]] = {}
    index: dict[str, float | None] = dict.fromkeys(AXES)
    for line in lines:
        index = {name: number(line[name]) if name in line else index[name] for name in AXES}
        for name, value in line.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in NOT_DRAWN and is_number:
                points.setdefault(name, []).append((index, number(value)))
    return {
        name: [_series(of, series)]
        for name, series in points.items()
        if any(value is not None for _, value in series)
    }


def joined(curves: Iterable[dict[str, list[Curve]]]) -> dict[str, list[Curve]]:
    """The curves of several seeds under one name each."""
    together: dict[str, list[Curve]] = {}
    for run_curves in curves:
        for name, series in run_curves.items():
            together.setdefault(name, []).extend(series)
    return together


def _series(of: str, points: list[tuple[dict[str, float | None], float | None]]) -> Curve:
    axes = {name: [index[name] for index, _ in points] for name in AXES}
    there = {name: values for name, values in axes.items() if any(value is not None for value in values)}
    return Curve(of, there, [value for _, value in points])


def _extremes(values: Sequence[float | None], most: int) -> list[int]:
    """Indices of the minimum and maximum of each bin, so that no spike is lost, and of both ends."""
    stretches = max(1, most // 2 - 1)
    indices = {0, len(values) - 1}
    for stretch in range(stretches):
        start, stop = stretch * len(values) // stretches, (stretch + 1) * len(values) // stretches
        finite = [(value, index) for index in range(start, stop) if (value := values[index]) is not None]
        indices |= {min(finite)[1], max(finite)[1]} if finite else {start}
    return sorted(indices)

"""Curves of a run, thinned so that a page stays small however long the run was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from saobp.report.files import number

POINTS = 600
"""Most points of a curve in a page, about as many as a screen can tell apart."""
AXES = ("step", "tokens", "seconds")


@dataclass(frozen=True)
class Series:
    """One curve: values over steps, with tokens and seconds where the run wrote them.

    ``of`` names the seed in a run with several; ``thinned``, if not None, is how
    many points there were.
    """

    of: str
    axes: dict[str, list[float | None]]
    values: list[float | None]
    thinned: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "of": self.of,
            "axes": {name: [_short(value) for value in values] for name, values in self.axes.items()},
            "values": [_short(value) for value in self.values],
            "thinned": self.thinned,
        }


def read_curves(lines: Sequence[dict[str, Any]], of: str = "") -> dict[str, list[Series]]:
    """A curve for every quantity that ``metrics.jsonl`` holds, in the order in which they appear.

    A value that is no finite number is a gap. Evaluation lines carry no tokens or seconds of their own, so
    they take those of the last line before.
    """
    points: dict[str, list[tuple[dict[str, float | None], float | None]]] = {}
    place: dict[str, float | None] = dict.fromkeys(AXES)
    for line in lines:
        place = {name: number(line[name]) if name in line else place[name] for name in AXES}
        for name, value in line.items():
            if name not in AXES and _is_numeric(value):
                points.setdefault(name, []).append((place, number(value)))
    return {
        name: [_series(of, found)]
        for name, found in points.items()
        if any(value is not None for _, value in found)
    }


def joined(curves: Iterable[dict[str, list[Series]]]) -> dict[str, list[Series]]:
    """The curves of several seeds under one name each."""
    together: dict[str, list[Series]] = {}
    for own in curves:
        for name, series in own.items():
            together.setdefault(name, []).extend(series)
    return together


def _series(of: str, points: list[tuple[dict[str, float | None], float | None]]) -> Series:
    kept = _thinned(points)
    axes = {name: [place[name] for place, _ in kept] for name in AXES}
    there = {name: values for name, values in axes.items() if any(value is not None for value in values)}
    return Series(of, there, [value for _, value in kept], None if len(kept) == len(points) else len(points))


def _thinned(points: list[Any]) -> list[Any]:
    """The lowest and the highest point of each stretch, so that no spike is lost; first and last stay."""
    if len(points) <= POINTS:
        return points
    stretches = POINTS // 2 - 1
    kept = {0, len(points) - 1}
    for stretch in range(stretches):
        start, stop = stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches
        finite = [place for place in range(start, stop) if points[place][1] is not None]
        if finite:
            kept |= {min(finite, key=lambda p: points[p][1]), max(finite, key=lambda p: points[p][1])}
        else:
            kept.add(start)
    return [points[place] for place in sorted(kept)]


def _is_numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")

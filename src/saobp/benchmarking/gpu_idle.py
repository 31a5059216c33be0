"""GPU utilisation from a trace of its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

LONG = 5.0
"""Microseconds; in a longer gap between kernels the GPU is idle."""

Span = tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """Kernels, copies and fills of some steps: their number and milliseconds a step, and long gaps."""

    kernels: float
    milliseconds: float
    waiting: float
    """Share of the traced time in gaps longer than ``LONG``."""

    @classmethod
    def of(cls, spans: Sequence[Span], steps: int) -> Trace:
        """From spans in microseconds."""
        merged = union(spans)
        busy = sum(end - start for start, end in merged)
        gaps = [later[0] - earlier[1] for earlier, later in pairwise(merged)]
        whole = merged[-1][1] - merged[0][0] if merged else 0.0
        long = sum(gap for gap in gaps if gap > LONG)
        return cls(len(spans) / steps, busy / 1000 / steps, long / whole if whole else 0.0)

    def idle_share(self, milliseconds: float) -> float:
        """Share of an untraced step of so many milliseconds in which no kernel runs."""
        return max(0.0, 1 - self.milliseconds / milliseconds)


def union(spans: Iterable[Span]) -> list[Span]:
    """Sorted spans, overlapping or adjacent ones merged."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged

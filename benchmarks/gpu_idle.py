"""GPU utilisation: from a trace of its kernels, and from ``nvidia-smi``."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from types import TracebackType

LONG = 5.0
"""Microseconds; in a longer gap between kernels the GPU is idle."""
SETTLING = timedelta(seconds=0.5)
"""Lag of the driver's readings: the start of an interval is dropped."""
EVERY = 100
"""Milliseconds between two readings of the driver."""

Span = tuple[float, float]
Interval = tuple[datetime, datetime]


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


class Utilisation:
    """Context that reads utilisation from ``nvidia-smi`` ten times a second; empty if it is missing.

    It runs in a subprocess and needs no trace, so it disturbs no measurement.
    """

    def __init__(self, gpu: str) -> None:
        self.command = (
            "nvidia-smi", f"--id={gpu}", "--query-gpu=timestamp,utilization.gpu",
            "--format=csv,noheader,nounits", f"--loop-ms={EVERY}",
        )  # fmt: skip
        self.lines: list[str] = []
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Utilisation:
        try:
            self._child = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return self
        self._reader = threading.Thread(target=self._read, args=(self._child,), daemon=True)
        self._reader.start()
        return self

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self.lines.append(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.terminate()
            self._child.wait()
            self._reader.join()

    def share(self, intervals: Sequence[Interval]) -> float | None:
        """Mean utilisation in intervals; None without readings."""
        found = [
            percent
            for moment, percent in map(reading, tuple(self.lines))
            if any(start + SETTLING <= moment <= end for start, end in intervals)
        ]
        return sum(found) / len(found) / 100 if found else None


def reading(line: str) -> tuple[datetime, float]:
    """Parse a line of ``nvidia-smi``: time and percent; ``datetime.min`` for other lines."""
    moment, _, percent = line.partition(",")
    try:
        return datetime.strptime(moment.strip(), "%Y/%m/%d %H:%M:%S.%f"), float(percent)
    except ValueError:
        return datetime.min, 0.0

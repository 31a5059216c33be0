"""A limit on time: no run is begun that would not end in it, and one that outruns it is stopped cleanly."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeIsUpError(BaseException):
    """Raised inside a run when the time is up; like an interruption, nothing but the end should catch it."""


RESERVE = 6.0
"""Seconds before the end at which a run writes its checkpoint and stops."""


class Deadline:
    """So many minutes from now on, or from ``began`` (by ``time.time``) on; None for no limit."""

    def __init__(self, minutes: float | None = None, began: float | None = None) -> None:
        if minutes is not None and not minutes > 0:
            raise ValueError(f"minutes must be above 0, not {minutes:g}")
        self.minutes, self.began = minutes, time.time() if began is None else began
        gone = time.time() - self.began
        self._end = None if minutes is None else time.monotonic() + 60 * minutes - gone

    @property
    def left(self) -> float:
        """Seconds."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def allows(self, seconds: float) -> bool:
        """Whether something so long ends before a run would be stopped."""
        return seconds <= self.left - RESERVE

    @property
    def is_near(self) -> bool:
        """Whether a run should stop now, with just enough time to leave what it has."""
        return self.left < RESERVE

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Raise :class:`TimeIsUpError` inside when the time is up; only the main thread can be told so."""
        main = threading.current_thread() is threading.main_thread()
        if self._end is None or not main or not hasattr(signal, "setitimer"):
            yield
            return
        before = signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, max(self.left, 1e-3))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise TimeIsUpError

"""Medians of repeated timings, interleaved so that drift affects all versions equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, one number per turn."""

    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.turns) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.turns, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def over(self, other: Timing) -> float:
        """Ratio to the other timing: the median over turns of the ratio within a turn."""
        return statistics.median(a / b for a, b in zip(self.turns, other.turns, strict=True))


@dataclass(frozen=True)
class Failure:
    """A version that could not be timed, and why."""

    reason: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        lines = str(error).strip().splitlines()
        return cls(f"{type(error).__name__}: {lines[0][:100] if lines else 'no message'}")


Result = Timing | Failure


def in_turn(
    calls: Mapping[str, Call],
    *,
    turns: int,
    budget: float,
    clock: Callable[[Call, int], float],
    warm_up: int = 2,
    replayed: bool = False,
) -> dict[str, Result]:
    """Time every call ``turns`` times, one after the other in each turn; a failing one is left out.

    Turns start with different calls, because the preceding one affects clocks, caches and heat.
    ``budget`` is the number of seconds for one call over all turns. ``clock`` returns
    milliseconds per call for a number of calls in a row. ``replayed`` times calls as CUDA graphs.
    """
    results: dict[str, Result] = {}
    repeats: dict[str, int] = {}
    ready: dict[str, Call] = {}
    for name, given in calls.items():
        try:
            call = ready[name] = captured(given) if replayed else given
            for _ in range(warm_up):
                call()
            repeats[name] = max(1, min(1000, int(budget * 1000 / turns / max(clock(call, 1), 1e-4))))
        except Exception as error:
            results[name] = Failure.of(error)
    milliseconds: dict[str, list[float]] = {name: [] for name in repeats}
    for turn in range(turns):
        names = [name for name in calls if name in repeats]
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            try:
                milliseconds[name].append(clock(ready[name], repeats[name]))
            except Exception as error:
                results[name] = Failure.of(error)
                del repeats[name]
    results.update({name: Timing(tuple(milliseconds[name])) for name in repeats})
    return {name: results[name] for name in calls}


def wall_clock(call: Call, repeats: int) -> float:
    """Milliseconds per call on a CPU."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) * 1e3 / repeats


def processor_clock(call: Call, repeats: int) -> float:
    """Milliseconds of this thread's processor time per call: steadier than wall time on a busy machine."""
    start = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - start) * 1e3 / repeats


def cuda_clock(call: Call, repeats: int) -> float:
    """Milliseconds per call between two CUDA events around a queue of calls.

    An extra call comes first, so that the GPU is busy while the host queues the timed ones.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    call()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats


def clock_of(device: str) -> Callable[[Call, int], float]:
    """The clock of ``cuda`` or ``cpu``."""
    return cuda_clock if device == "cuda" else wall_clock


def added_memory(call: Call) -> float:
    """MiB that a call on a GPU adds to what is allocated, at its peak."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


@dataclass(frozen=True)
class Captured:
    """A call as a CUDA graph. It keeps ``call``, and so the tensors that a replay reads."""

    call: Call
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        self.graph.replay()


def captured(call: Call) -> Captured:
    """The call as a CUDA graph, whose replay has no gaps between launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return Captured(call, graph)

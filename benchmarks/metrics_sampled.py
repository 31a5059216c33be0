"""The sampled statistics against the exact ones and against plain attention: time and memory over length.

    python benchmarks/metrics_sampled.py --lengths 512 1024 2048          on a CPU, under a minute
    python benchmarks/metrics_sampled.py --device cuda --lengths 32768 --heads 16 --cases causal full high:0.2

A case is causal or full (plain attention), a refinement of full attention such as high:0.2, or one of causal
attention such as causal/high:0.2. Prints a Markdown table with, for each length and case, the time of one
attention forward (scaled_dot_product_attention with the same causality), of the sampled and the exact method,
how many forwards the sampled method costs, peak memory beyond the inputs, and the largest standard error of
GTD. The exact method is left out beyond --exact-up-to. With --out the table is also written to that folder.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from saobp import Refinement, metrics
from saobp.benchmarking.table import BenchmarkTable, Cell
from saobp.metrics.sampling import SAMPLED
from saobp.runs.machine import machine
from saobp.timing import Timing, added_memory, cuda_clock, wall_clock

WAYS = ("attention", "sampled", "exact")


@dataclass(frozen=True)
class Case:
    """A benchmark case: states of one shape, causal or not, refined or not."""

    name: str
    length: int
    heads: int
    dim: int
    device: str
    dtype: torch.dtype
    turns: int

    @property
    def causal(self) -> bool:
        return self.name.split("/")[0] == "causal"

    @property
    def refinement(self) -> Refinement:
        kind, _, refined = self.name.partition("/")
        return Refinement.parse(refined or ("none" if kind in ("causal", "full") else kind))

    def calls(self) -> dict[str, Callable[[], object]]:
        random = torch.Generator(self.device).manual_seed(0)
        shape = 1, self.heads, self.length, self.dim
        query, key, value = (
            torch.randn(shape, generator=random, device=self.device, dtype=self.dtype) for _ in range(3)
        )
        options = {"refinement": self.refinement, "is_causal": self.causal}
        return {
            "attention": lambda: scaled_dot_product_attention(query, key, value, is_causal=self.causal),
            "sampled": lambda: metrics.measure(query, key, method="sampled", **options),
            "exact": lambda: metrics.measure(query, key, statistics=SAMPLED, **options),
        }


@dataclass(frozen=True)
class Measured:
    """Milliseconds per turn, MiB beyond the inputs, and the largest standard error of GTD."""

    time: Timing
    memory: float
    error: float | None


def on_gpu(case: Case, ways: list[str]) -> dict[str, Measured]:
    """All methods in one process; the allocator's peak is reset for each."""
    calls, found = case.calls(), {}
    for way in ways:
        error = error_of_gtd(calls[way]())
        memory = added_memory(calls[way])
        turns = tuple(cuda_clock(calls[way], 1) for _ in range(case.turns))
        found[way] = Measured(Timing(turns), memory, error)
    return found


def on_cpu(case: Case, ways: list[str]) -> dict[str, Measured]:
    """Each method in a subprocess, to measure its peak memory."""
    context = get_context("spawn")
    found = {}
    for way in ways:
        results: Queue[Measured] = context.Queue()
        worker = context.Process(target=in_own_process, args=(case, way, results))
        worker.start()
        found[way] = results.get()
        worker.join()
    return found


def in_own_process(case: Case, way: str, results: Queue[Measured]) -> None:
    call = case.calls()[way]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = error_of_gtd(call())
    turns = tuple(wall_clock(call, 1) for _ in range(case.turns))
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    results.put(Measured(Timing(turns), memory, error))


def error_of_gtd(found: object) -> float | None:
    return float(found["gtd"].standard_error.max()) if isinstance(found, dict) else None


def row(case: Case, found: dict[str, Measured]) -> dict[str, Cell]:
    attention, sampled, exact = (found.get(way) for way in WAYS)
    assert attention is not None
    assert sampled is not None
    cells: dict[str, Cell] = {
        "length": case.length,
        "case": case.name,
        "attention ms": attention.time.median,
        "sampled ms": sampled.time.median,
        "forwards": sampled.time.median / attention.time.median,
        "sampled MiB": sampled.memory,
        "error of GTD": sampled.error,
    }
    return cells | ({"exact ms": exact.time.median, "exact MiB": exact.memory} if exact is not None else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--cases", nargs="+", default=["causal"], metavar="CASE")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on cuda, float32 on cpu")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--exact-up-to", type=int, default=2048)
    parser.add_argument("--out", type=Path, help="folder for the Markdown and CSV files")
    options = parser.parse_args()
    dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    title = f"Sampled statistics, {dtype}, {options.heads} heads of {options.dim}"
    table = BenchmarkTable("metrics-sampled", title, machine(options.device))
    table.notes.append(
        f"Milliseconds, medians of {options.turns} turns. 'forwards' is sampled over attention, one forward "
        "pass of scaled_dot_product_attention with the same causality. Memory is the peak beyond the inputs."
    )
    for length in options.lengths:
        for name in options.cases:
            print(f"length {length}, {name} ...", file=sys.stderr, flush=True)
            case = Case(
                name, length, options.heads, options.dim, options.device, getattr(torch, dtype), options.turns
            )
            ways = [way for way in WAYS if way != "exact" or length <= options.exact_up_to]
            table.rows.append(row(case, (on_gpu if case.device == "cuda" else on_cpu)(case, ways)))
            if options.out is not None:
                table.write(options.out)
    print(table.markdown())


if __name__ == "__main__":
    main()

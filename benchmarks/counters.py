"""What limits each kernel, read from the GPU's own counters by NVIDIA's profiler ``ncu``.

    python benchmarks/counters.py --out benchmarks/results    # needs a CUDA GPU and ncu on the path

The script starts itself under ``ncu`` with ``--make-calls``.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.attention import SDPBackend

from saobp.benchmarking.attention import (
    DIM,
    HEADS,
    ROWS,
    STRENGTH,
    attend_plain,
    attend_refined,
    one_call,
    states_and_gradient,
)
from saobp.benchmarking.table import BenchmarkTable, Cell
from saobp.runs.machine import machine

LENGTHS = (128, 512, 2048, 8192)
COUNTERS = {
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "special functions": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue slots": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "level 2 cache": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "level 1 cache": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""Counters, in per cent of the hardware's peak."""
TIME, REGISTERS = "gpu__time_duration.sum", "launch__registers_per_thread"
LEAST_SHARE = 0.02
"""Kernels with a smaller share of their call's time are left out."""

Reading = dict[str, str]
"""One launch as ``ncu`` prints it, by the names of its columns."""


def attention_counters(lengths: tuple[int, ...] = LENGTHS) -> BenchmarkTable:
    """Every kernel of a forward and a backward pass, bidirectional and causal, refined and by cuDNN."""
    profiler = shutil.which("ncu")
    if profiler is None:
        raise RuntimeError("counters are read by NVIDIA's profiler ncu, which is not on the path")
    metrics = ",".join([TIME, REGISTERS, *COUNTERS.values()])
    options = ["--clock-control", "none", "--profile-from-start", "off", "--metrics", metrics]
    output = ["--page", "raw", "--csv", "--print-units", "base"]
    calls = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--make-calls",
        "--lengths",
        ",".join(map(str, lengths)),
    ]
    done = subprocess.run([profiler, *options, *output, *calls], capture_output=True, text=True, check=False)
    found = launches(done.stdout)
    if not found:
        said = (done.stdout + done.stderr).strip().splitlines() or ["it says nothing"]
        raise RuntimeError(f"ncu read no kernel: {said[-1]}")
    title = (
        f"Counters of refined attention (high, strength {STRENGTH}) and cuDNN's, bfloat16, head size {DIM}"
    )
    table = BenchmarkTable("counters", title, machine("cuda"))
    table.notes.append(
        "Per cent of the peak. Kernels run one at a time here, also halves of a call that otherwise "
        f"run side by side. About {ROWS} rows (batch x heads x length) each; one forward and one backward "
        f"pass. Kernels below {100 * LEAST_SHARE:.0f} % of their call's time are left out."
    )
    table.rows.extend(kernel_rows(found, lengths))
    return table


def launches(printed: str) -> list[Reading]:
    """Parse the readings of all launches; skips lines outside the table and the units."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    return list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]


def kernel_rows(found: list[Reading], lengths: tuple[int, ...]) -> Iterator[dict[str, Cell]]:
    """One row for each kernel of each call. Refined and plain calls alternate, told apart by kernel names."""
    calls = [
        (length, causal, plain) for length in lengths for causal in (False, True) for plain in (False, True)
    ]
    for (length, causal, plain), (_, group) in zip(calls, groupby(found, is_plain), strict=False):
        by_name: dict[str, list[Reading]] = {}
        for reading in group:
            by_name.setdefault(reading["Kernel Name"], []).append(reading)
        whole = sum(number(one[TIME]) for ones in by_name.values() for one in ones)
        for name, ones in by_name.items():
            time = sum(number(one[TIME]) for one in ones)
            if time < LEAST_SHARE * whole:
                continue
            yield {
                "attention": "causal" if causal else "bidirectional",
                "length": length,
                "by": "cuDNN" if plain else "saobp",
                "kernel": short_name(name),
                "launches": len(ones),
                "microseconds": time / 1e3,
                **{
                    counter: sum(number(one[metric]) * number(one[TIME]) for one in ones) / time
                    for counter, metric in COUNTERS.items()
                },
                "registers": int(number(ones[0][REGISTERS])),
            }


def short_name(kernel: str) -> str:
    """A kernel's name without its types; cuDNN's generated names by their purpose."""
    generated = re.search(r"cudnn_generated.*flash_(fprop|bprop)", kernel)
    return f"flash_{generated[1]}" if generated else re.split(r"[<(]", kernel.removeprefix("void "))[0]


def is_plain(reading: Reading) -> bool:
    return "cudnn" in reading["Kernel Name"]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def make_calls(lengths: tuple[int, ...]) -> None:
    """Each call twice, the second time for the profiler: everything is compiled by then."""
    strength = torch.full((HEADS,), STRENGTH, device="cuda")
    calls = []
    for length in lengths:
        shape = max(1, ROWS // (HEADS * length)), HEADS, length, DIM
        for causal in (False, True):
            versions = (
                partial(attend_refined, "fused", causal, strength),
                partial(attend_plain, SDPBackend.CUDNN_ATTENTION, causal),
            )
            states = states_and_gradient(shape, torch.bfloat16, "cuda")
            calls += [one_call(attend, states, "forward + backward") for attend in versions]
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="joined by commas")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--make-calls", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    lengths = tuple(int(length) for length in given.lengths.split(","))
    if given.make_calls:
        make_calls(lengths)
        return
    try:
        table = attention_counters(lengths)
    except RuntimeError as problem:
        sys.exit(f"no counters: {problem}")
    table.show(Console(width=220))
    table.write(given.out)


if __name__ == "__main__":
    main()

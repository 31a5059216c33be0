"""What limits each kernel, read from the GPU's own counters by NVIDIA's profiler ``ncu``.

    python benchmarks/counters.py --out FOLDER    # needs a CUDA GPU and ncu on the path

The script starts itself under ``ncu`` once for each length, with ``--make-calls``, and writes the table
after each.
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
    LEARNED,
    ROWS,
    STRENGTH,
    attend_plain,
    attend_refined,
    learned_call,
    one_call,
    states_and_gradient,
)
from saobp.benchmarking.decoding import KEYS, LLAMA, PARTS, make_step, step_call
from saobp.benchmarking.table import BenchmarkTable, Cell
from saobp.runs.machine import machine
from saobp.timing import Call

SEQUENCES = 32
MARK = "spin_kernel"
"""The kernel of ``torch.cuda._sleep``."""
BOTH = "forward + backward"
DECODING = "decoding"
LENGTHS = f"256,512,1024,2048,{DECODING}"
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
BETWEEN = "smsp__average_warp_latency_per_inst_issued.ratio"
STALLS = {
    name: f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio"
    for name, stall in {
        "a barrier": "barrier",
        "matrix products": "gmma",
        "memory": "long_scoreboard",
        "shared memory or special functions": "short_scoreboard",
        "a busy unit": "math_pipe_throttle",
        "the last instruction": "wait",
        "a free issue slot": "not_selected",
    }.items()
}
"""Why warps wait: cycles between two instructions of a warp, by reason, out of ``BETWEEN``."""
LEAST_SHARE = 0.02
"""Kernels with a smaller share of their call's time are left out."""

CASES = ("fixed", *LEARNED)
"""The refined calls of a length."""

Reading = dict[str, str]
"""One launch as ``ncu`` prints it, by the names of its columns."""


def empty_table() -> BenchmarkTable:
    title = f"Counters of refined attention and cuDNN's, bfloat16, head size {DIM}"
    table = BenchmarkTable("counters", title, machine("cuda"))
    table.notes.append(
        "Per cent of the peak; 'waits for' has the two largest reasons for which a warp does not issue, in "
        "per cent of the time between two of its instructions. 'fixed' is `high` with strength "
        f"{STRENGTH}, 'learned' and 'key bias' have learned strengths of 0.05 to 4 and their gradients. "
        "Kernels run one at a time here, also halves of a call that otherwise run side by side. About "
        f"{ROWS} rows (batch x heads x length) each; one forward and one backward pass, then a decoding step "
        f"of {SEQUENCES} sequences. Kernels below "
        f"{100 * LEAST_SHARE:.0f} % of their call's time are left out."
    )
    return table


def read_counters(length: int | None) -> list[dict[str, Cell]]:
    """Every kernel of a forward and a backward pass at one length, or of a decoding step if None."""
    profiler = shutil.which("ncu")
    if profiler is None:
        raise RuntimeError("counters are read by NVIDIA's profiler ncu, which is not on the path")
    metrics = ",".join([TIME, REGISTERS, BETWEEN, *COUNTERS.values(), *STALLS.values()])
    options = ["--clock-control", "none", "--profile-from-start", "off", "--metrics", metrics]
    output = ["--page", "raw", "--csv", "--print-units", "base"]
    calls = [sys.executable, "-W", "ignore", __file__, "--make-calls", "--lengths", str(length or DECODING)]
    done = subprocess.run([profiler, *options, *output, *calls], capture_output=True, text=True, check=False)
    found = launches(done.stdout)
    if not found:
        said = (done.stdout + done.stderr).strip().splitlines() or ["it says nothing"]
        raise RuntimeError(f"ncu read no kernel: {said[-1]}")
    return list(kernel_rows(found, length))


def launches(printed: str) -> list[Reading]:
    """Parse the readings of all launches; skips lines outside the table and the units."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    return list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]


def call_names(length: int | None) -> list[tuple[str, int, str]]:
    """Attention, length and version of each profiled call, in the order of ``make_calls``."""
    if length is None:
        return [(f"decoding, batch {SEQUENCES}", KEYS, by) for by in ("saobp, learned", "sdpa")]
    return [
        ("causal" if causal else "bidirectional", length, by)
        for causal in (False, True)
        for by in (*(f"saobp, {case}" for case in CASES), "cuDNN")
    ]


def kernel_rows(found: list[Reading], length: int | None) -> Iterator[dict[str, Cell]]:
    """One row for each kernel of each call. A kernel that does nothing, ``MARK``, follows each call."""
    groups = [list(group) for mark, group in groupby(found, is_mark) if not mark]
    for (attention, tokens, by), group in zip(call_names(length), groups, strict=False):
        yield from rows_of_call(attention, tokens, by, group)


def rows_of_call(attention: str, length: int, by: str, readings: list[Reading]) -> Iterator[dict[str, Cell]]:
    """One row for each kernel that takes a part of the call's time worth mentioning."""
    by_name: dict[str, list[Reading]] = {}
    for reading in readings:
        by_name.setdefault(reading["Kernel Name"], []).append(reading)
    whole = sum(number(one[TIME]) for one in readings)
    for name, ones in by_name.items():
        time = sum(number(one[TIME]) for one in ones)
        if time >= LEAST_SHARE * whole:
            yield {
                "attention": attention,
                "length": length,
                "by": by,
                "kernel": short_name(name),
                "launches": len(ones),
                "microseconds": time / 1e3,
                **{counter: mean(ones, metric) for counter, metric in COUNTERS.items()},
                "registers": int(number(ones[0][REGISTERS])),
                "waits for": waits(ones),
            }


def mean(ones: list[Reading], metric: str) -> float:
    """Over launches of a kernel, by their times."""
    times = [number(one[TIME]) for one in ones]
    return sum(number(one[metric]) * time for one, time in zip(ones, times, strict=True)) / sum(times)


def waits(ones: list[Reading]) -> str:
    """The two largest reasons for which warps wait, in per cent of the time between two instructions."""
    between = mean(ones, BETWEEN)
    shares = {name: 100 * mean(ones, metric) / between for name, metric in STALLS.items()}
    first = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    return ", ".join(f"{name} {shares[name]:.0f}" for name in first)


def short_name(kernel: str) -> str:
    """A kernel's name without its types; cuDNN's generated names by their purpose."""
    generated = re.search(r"cudnn_generated.*flash_(fprop|bprop)", kernel)
    return f"flash_{generated[1]}" if generated else re.split(r"[<(]", kernel.removeprefix("void "))[0]


def is_mark(reading: Reading) -> bool:
    return MARK in reading["Kernel Name"]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def attention_calls(length: int) -> list[Call]:
    strength = torch.full((HEADS,), STRENGTH, device="cuda")
    shape = max(1, ROWS // (HEADS * length)), HEADS, length, DIM
    calls = []
    for causal in (False, True):
        states = states_and_gradient(shape, torch.bfloat16, "cuda")
        fixed = one_call(partial(attend_refined, "fused", causal, strength), states, BOTH)
        for case in CASES:
            calls.append(fixed if case == "fixed" else learned_call(LEARNED[case], causal, states, BOTH))
        calls.append(one_call(partial(attend_plain, SDPBackend.CUDNN_ATTENTION, causal), states, BOTH))
    return calls


def decoding_calls() -> list[Call]:
    step = make_step(SEQUENCES, KEYS, LLAMA, torch.bfloat16, "cuda")
    return [step_call(name, step, LLAMA, PARTS[0]) for name in ("learned", "sdpa")]


def make_calls(length: int | None) -> None:
    """Each call twice, the second time for the profiler: everything is compiled by then."""
    calls = decoding_calls() if length is None else attention_calls(length)
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for call in calls:
        call()
        torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def chosen(lengths: str) -> list[int | None]:
    """Lengths joined by commas; None for a decoding step."""
    return [None if word == DECODING else int(word) for word in lengths.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default=LENGTHS, help="joined by commas; 'decoding' for a decoding step")
    parser.add_argument("--out", type=Path, help="folder for the Markdown and CSV files")
    parser.add_argument("--make-calls", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make_calls:
        for length in chosen(given.lengths):
            make_calls(length)
        return
    table = empty_table()
    for length in chosen(given.lengths):
        try:
            table.rows.extend(read_counters(length))
        except RuntimeError as problem:
            sys.exit(f"no counters of {length or DECODING}: {problem}")
        if given.out is not None:
            table.write(given.out)
    table.show(Console(width=220))


if __name__ == "__main__":
    main()

"""Many short runs on one machine: processes that share them, and paired comparisons of their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saobp.runs.worker_processes import WATCH_VARIABLE

DEADLINE = "DEADLINE"
"""Environment variable: seconds since 1970 after which no run may end. Workers start none that would."""


def run_workers(script: str, out: Path, given: list[Any], workers: int) -> None:
    """Run ``script work --out OUT --given JSON`` in several processes at once and wait for them."""
    claims = out / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    for claim in claims.iterdir():
        claim.unlink()
    began = time.monotonic()
    line = [sys.executable, script, "work", "--out", str(out), "--given", json.dumps(given)]
    threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", WATCH_VARIABLE: "1"}
    children = []
    for number in range(workers):
        with (out / f"worker-{number}.log").open("w") as log:
            children.append(
                subprocess.Popen(
                    line, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                    env={**os.environ, **threads},
                )
            )  # fmt: skip
    codes = [child.wait() for child in children]
    print(f"{workers} processes, {time.monotonic() - began:.0f} s, {sum(map(bool, codes))} of them failed")


def claimed(out: Path, names: list[str]) -> Iterator[str]:
    """Names of runs for this process: those that no other has claimed, in order, while time is left."""
    deadline, longest = float(os.environ.get(DEADLINE, "inf")), 0.0
    for name in names:
        if time.time() + longest > deadline:
            print(f"no time left for {name} and later runs", flush=True)
            return
        try:
            (out / "claims" / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        began = time.monotonic()
        yield name
        longest = max(longest, time.monotonic() - began)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def compare(
    cells: list[str],
    method: Mapping[int, float],
    base: Mapping[int, float],
    digits: int,
    higher_is_better: bool = True,
) -> Any:
    """Print a row of a Markdown table: cells, pairs, means of base and method, difference, verdict.

    method, base: scores by seed; pairs have the seed in common

    Returns what ``paired_gain`` found.
    """
    from saobp.lab.statistics import paired_gain

    gain = paired_gain(method, base, higher_is_better=higher_is_better)
    if gain is None:
        return None
    seeds = sorted(set(method) & set(base))
    means = [f"{sum(side[seed] for seed in seeds) / len(seeds):.{digits}f}" for side in (base, method)]
    between = "" if gain.low is None else f" [{gain.low:+.{digits}f}, {gain.high:+.{digits}f}]"
    row = [*cells, str(gain.pairs), *means, f"{gain.difference:+.{digits}f}{between}", gain.verdict]
    print("| " + " | ".join(row) + " |")
    return gain

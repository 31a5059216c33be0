"""Several commands at a time on one machine.

A small model keeps a large GPU waiting for the Python process that drives it, so some processes beside each
other finish a list of tasks several times as fast as one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path


def run_jobs(
    commands: Mapping[str, Sequence[str]],
    jobs: int,
    logs: Path,
    done: Callable[[str, int], None] = lambda *_: None,
) -> dict[str, int]:
    """Run named commands, at most ``jobs`` at once, in order; returns their exit codes.

    What each says goes to ``logs/NAME.log``. ``done`` is called with a name and its exit code.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
    logs.mkdir(parents=True, exist_ok=True)
    cores = os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": str(max(1, cores // jobs)), "RAYON_NUM_THREADS": str(max(1, cores // jobs))}
    environment = {**os.environ, **threads}

    def run(name: str) -> int:
        with (logs / f"{name}.log").open("w") as log:
            return subprocess.run(
                commands[name], stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
            ).returncode

    codes: dict[str, int] = {}
    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(run, name): name for name in commands}
        for finished in as_completed(started):
            name = started[finished]
            codes[name] = finished.result()
            done(name, codes[name])
    return codes

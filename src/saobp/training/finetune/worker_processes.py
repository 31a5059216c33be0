"""Several commands at a time on one machine.

A small model keeps a large GPU waiting for the Python process that drives it, so some processes beside each
other finish a list of tasks several times as fast as one.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from saobp.runs.provenance import JOBS_VARIABLE


def run_jobs(
    commands: Mapping[str, Sequence[str]],
    jobs: int,
    logs: Path,
    done: Callable[[str, int], None] = lambda *_: None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Run named commands, at most ``jobs`` at once, in order; returns their exit codes.

    What each says goes to ``logs/NAME.log``. ``done`` is called with a name and its exit code. ``variables``
    are set in their environment, and the number of jobs, which their records then carry. An interruption ends
    those that run and begins no other.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
    logs.mkdir(parents=True, exist_ok=True)
    cores = os.cpu_count() or 1
    threads = str(max(1, cores // jobs))
    shared = {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads, JOBS_VARIABLE: str(jobs)}
    environment = {**os.environ, **shared, **(variables or {})}

    children: list[subprocess.Popen[bytes]] = []
    stopped = threading.Event()

    def run(name: str) -> int:
        with (logs / f"{name}.log").open("w") as log:
            child = subprocess.Popen(commands[name], stdout=log, stderr=subprocess.STDOUT, env=environment)
            children.append(child)
            if stopped.is_set():  # while it was started
                child.terminate()
            return child.wait()

    codes: dict[str, int] = {}
    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(run, name): name for name in commands}
        try:
            for finished in as_completed(started):
                name = started[finished]
                codes[name] = finished.result()
                done(name, codes[name])
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.terminate()
            raise
    return codes

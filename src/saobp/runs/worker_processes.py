"""Run several commands in parallel on one machine.

Small models leave a large GPU waiting for Python, so several processes finish a list of tasks several times
as fast as one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

JOBS_VARIABLE = "SAOBP_JOBS"
"""Set for processes that share a machine: how many there are."""
MINUTE = 60.0
WATCH_VARIABLE = "SAOBP_END_WITH_INPUT"
"""Set for worker processes: their standard input is a pipe that closes when the parent ends."""


def run_jobs(
    commands: Mapping[str, Sequence[str]],
    jobs: int,
    logs: Path,
    done: Callable[[str, int], None] = lambda *_: None,
    variables: Mapping[str, str] | None = None,
    each_minute: Callable[[], object] = lambda: None,
) -> dict[str, int]:
    """Run named commands, at most ``jobs`` at once, in order; returns their exit codes.

    Output goes to ``logs/NAME.log``. ``done`` is called with a name and its exit code, ``each_minute``
    while they run. ``variables`` are set in their environment, and the number of jobs, which their records
    then carry. An interruption terminates running commands and starts no more. Commands of saobp
    also end when this process is killed.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
    logs.mkdir(parents=True, exist_ok=True)
    cores = os.cpu_count() or 1
    threads = str(max(1, cores // jobs))
    shared = {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads, JOBS_VARIABLE: str(jobs)}
    shared[WATCH_VARIABLE] = "1"
    environment = {**os.environ, **shared, **(variables or {})}

    children: list[subprocess.Popen[bytes]] = []
    stopped = threading.Event()

    def run(name: str) -> int:
        with (
            (logs / f"{name}.log").open("w") as log,
            subprocess.Popen(
                commands[name], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment
            ) as child,
        ):
            children.append(child)
            if stopped.is_set():  # while it was started
                child.terminate()
            code = child.wait()
            children.remove(child)
        return code

    codes: dict[str, int] = {}
    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(run, name): name for name in commands}
        last = time.monotonic()
        try:
            while started:
                finished, _ = wait(started, max(0.0, last + MINUTE - time.monotonic()), FIRST_COMPLETED)
                for future in finished:
                    name = started.pop(future)
                    codes[name] = future.result()
                    done(name, codes[name])
                if time.monotonic() - last >= MINUTE:
                    last = time.monotonic()
                    each_minute()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for child in list(children):
                child.terminate()
            raise
    return codes


def end_with_parent() -> None:
    """Called by a worker process at its start: it is terminated as soon as its parent is gone.

    The kernel closes the parent's end of a pipe however the parent ends, and on every system.
    """
    if os.environ.pop(WATCH_VARIABLE, None) is not None:
        threading.Thread(target=_terminate_at_end_of_input, daemon=True).start()


def _terminate_at_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

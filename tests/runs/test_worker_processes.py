"""Several commands at a time, which end with the process that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from saobp.runs import worker_processes
from saobp.runs.worker_processes import run_jobs


def test_jobs_run_beside_each_other_and_say_how_they_ended(tmp_path):
    wait = "import pathlib, sys, time; p = pathlib.Path(sys.argv[1]); p.touch()\n"
    wait += "while len(list(p.parent.glob('*.ready'))) < 2: time.sleep(0.01)"
    commands = {name: [sys.executable, "-c", wait, str(tmp_path / f"{name}.ready")] for name in ("a", "b")}
    commands["c"] = [sys.executable, "-c", "print('why'); raise SystemExit(3)"]
    ended = []
    codes = run_jobs(commands, 2, tmp_path / "logs", lambda name, code: ended.append((name, code)))
    assert codes == {"a": 0, "b": 0, "c": 3}
    assert sorted(ended) == [("a", 0), ("b", 0), ("c", 3)]
    assert (tmp_path / "logs/c.log").read_text() == "why\n"
    with pytest.raises(ValueError, match="jobs must be at least 1"):
        run_jobs(commands, 0, tmp_path)


def test_progress_is_told_each_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "MINUTE", 0.05)
    ticks: list[int] = []
    sleeper = [sys.executable, "-c", "import time; time.sleep(0.4)"]
    assert run_jobs({"one": sleeper}, 1, tmp_path, each_minute=lambda: ticks.append(1)) == {"one": 0}
    assert len(ticks) >= 2


def test_many_short_jobs_leave_no_pipe_open_and_progress_is_told_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "MINUTE", 0.2)
    ticks: list[int] = []
    files: list[int] = []
    run_jobs(
        {f"job-{number}": ["sleep", "0.02"] for number in range(30)},
        1,
        tmp_path,
        done=lambda *_: files.append(len(list(Path("/proc/self/fd").iterdir()))),
        each_minute=lambda: ticks.append(1),
    )
    assert max(files) - files[0] < 10
    assert ticks


def test_an_interruption_ends_the_jobs_that_run_and_begins_no_other(tmp_path):
    sleeps = {"first": 0, "second": 60, "third": 0}
    commands = {
        name: [sys.executable, "-c", f"import time; time.sleep({seconds})"]
        for name, seconds in sleeps.items()
    }

    def interrupted(*_):
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(commands, 1, tmp_path, interrupted)
    assert time.monotonic() - began < 30
    assert not (tmp_path / "third.log").exists()


WORKER = """
import os, sys, time
from saobp.runs.worker_processes import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import sys
from pathlib import Path
from saobp.runs.worker_processes import run_jobs
run_jobs({"worker": [sys.executable, "-c", sys.argv[1]]}, 1, Path(sys.argv[2]))
"""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, WORKER, str(tmp_path)])
    log = tmp_path / "worker.log"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert parent.poll() is None
        time.sleep(0.01)
    worker = int(log.read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while is_alive(worker):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.01)


def test_only_a_worker_watches_its_input():
    """Anyone else may run the command with its input closed."""
    command = [sys.executable, "-c", "from saobp.runs.worker_processes import end_with_parent as e; e()"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 0


def test_the_command_watches_its_parent():
    environment = {**os.environ, "SAOBP_END_WITH_INPUT": "1"}
    command = [sys.executable, "-c", "from saobp.cli import main; import time; main(); time.sleep(60)"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False, timeout=50)
    assert ended.returncode == -signal.SIGTERM


def is_alive(process: int) -> bool:
    """Also one that has ended and waits for somebody to notice counts as ended."""
    try:
        with Path(f"/proc/{process}/stat").open() as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

"""Locks keep other processes out, and go with the process that holds them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from saobp.runs.folder import RunError, RunFolder
from saobp.storage.locks import exclusive, try_lock

HOLD = """
import sys, time
from pathlib import Path
from saobp.storage.locks import {function}
held = {call}
print("held", flush=True)
time.sleep(60)
"""


def holder(function: str, call: str) -> subprocess.Popen[str]:
    """Another process, once it has a lock."""
    code = HOLD.format(function=function, call=call)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_lock_goes_with_a_killed_process(tmp_path: Path) -> None:
    child = holder("try_lock", f"try_lock(Path({str(tmp_path / 'lock')!r}))")
    try:
        assert try_lock(tmp_path / "lock") is None
    finally:
        child.kill()
        child.wait()
    taken = try_lock(tmp_path / "lock")
    assert taken is not None
    taken.release()


def test_a_run_that_another_process_works_on_is_refused_until_it_is_killed(tmp_path: Path) -> None:
    child = holder("try_lock", f"try_lock(Path({str(tmp_path / '.lock')!r}))")
    try:
        with pytest.raises(RunError, match="another process is at work"):
            RunFolder.start(tmp_path, "pretrain", {}, seed=0)
    finally:
        child.kill()
        child.wait()
    RunFolder.start(tmp_path, "pretrain", {}, seed=0).fail()


def test_the_second_waits_for_the_first_and_not_for_a_killed_one(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    child = holder("exclusive", f"(context := exclusive(Path({str(folder)!r}))).__enter__()")
    began = time.monotonic()
    killer = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({child.pid}, 9)"]
    )
    with exclusive(folder):
        assert time.monotonic() - began > 0.3
    killer.wait()
    child.wait()

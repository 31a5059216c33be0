"""Folders that are complete or absent, and made by one process at a time."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # no file locks on this system: two processes may both do the work, which is only slow
    fcntl = None  # type: ignore[assignment]


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here for the same folder; a killed process leaves no lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of ``folder`` once all is on the disk."""
    for left_over in folder.parent.glob(f".{glob.escape(folder.name)}.writing-*"):
        if fcntl is not None:
            shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.writing-") as name:
        new, old = Path(name, "new"), Path(name, "old")
        new.mkdir()
        yield new
        for file in new.iterdir():
            _to_disk(file)
        _to_disk(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        _to_disk(folder.parent)


def _to_disk(path: Path) -> None:
    if os.name == "nt":
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

"""Locks between processes, released by the operating system when a process dies."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock file next to a folder; waits for other processes.

    In a read-only location an existing folder is read without a lock.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire()
    except OSError as problem:
        if problem.errno not in READ_ONLY or not folder.is_dir():
            raise
    try:
        yield
    finally:
        lock.release()


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for other writers of a folder, by a lock on the folder that it is in, so that no file is added.

    Where that cannot be locked (Windows, some network drives, a parent that may not be read) nothing is.
    """
    parent = folder.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if fcntl is not None:
            with suppress(OSError):
                opened = os.open(parent, os.O_RDONLY)
                stack.callback(os.close, opened)
                fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def try_lock(file: Path) -> BaseFileLock | None:
    """Lock a file without waiting: the lock, held until released, or None where another process has it.

    On a file system without locks nothing is locked.
    """
    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    except OSError as problem:
        if problem.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise
    return lock

"""Locks between processes, held by the operating system: a killed process leaves none behind."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait until no other process holds the lock of a folder, which lies beside it.

    In a read-only place nothing can be made, so an existing folder is read without a lock.
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


def try_lock(file: Path) -> BaseFileLock | None:
    """Lock a file without waiting: the lock, held until released, or None where another process has it.

    A file system without locks keeps nobody out.
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

"""What went wrong, in the words of a command."""

from __future__ import annotations

import errno
from pathlib import Path


def in_words(problem: BaseException) -> str:
    """A problem as one sentence; what the system says of a file, without its number."""
    if not isinstance(problem, OSError) or problem.strerror is None or problem.filename is None:
        return str(problem)
    if problem.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{str(problem.filename)!r} cannot be a folder: it is a file, or lies below one"
    return f"{problem.strerror}: {str(problem.filename)!r}"


def check_data_dir(folder: Path | None) -> None:
    """Refuse a folder that is not there at once, not once for every run or after asking the hub."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"the data folder {folder} does not exist: check --data-dir")

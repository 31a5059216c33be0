"""What went wrong, in the words of a command."""

from __future__ import annotations

import errno


def in_words(problem: BaseException) -> str:
    """A problem as one sentence; what the system says of a file, without its number."""
    if not isinstance(problem, OSError) or problem.strerror is None or problem.filename is None:
        return str(problem)
    if problem.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{str(problem.filename)!r} cannot be a folder: it is a file, or lies below one"
    return f"{problem.strerror}: {str(problem.filename)!r}"

"""Errors of a command: one sentence on stderr, and exit code 1."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NoReturn

import typer
from rich.text import Text

from saobp.commands.streams import notes


def print_error(sentence: str) -> None:
    """To stderr, in red on a terminal; only on rank 0."""
    notes().print(Text(sentence, style="red"), soft_wrap=True)


def fail(problem: BaseException | str) -> NoReturn:
    """Print the error and end the command with exit code 1."""
    print_error(problem if isinstance(problem, str) else in_words(problem))
    raise typer.Exit(1) from None


def in_words(problem: BaseException) -> str:
    """An error as one sentence; of an OSError the system's message and the file, without its number."""
    if not isinstance(problem, OSError) or problem.strerror is None or problem.filename is None:
        return str(problem)
    if problem.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{str(problem.filename)!r} cannot be a folder: it is a file, or lies below one"
    return f"{problem.strerror}: {str(problem.filename)!r}"


def check_data_dir(folder: Path | None) -> None:
    """Fail early on a missing folder, not once per run or after a hub lookup."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"the data folder {folder} does not exist: check --data-dir")

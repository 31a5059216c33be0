"""The two streams of every command: results on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON on stdout, nothing else.")]


def stdout_console() -> Console:
    """Stdout; silent in all processes but the first."""
    return Console(quiet=os.environ.get("RANK", "0") != "0")


def stderr_console() -> Console:
    """Stderr; silent in all processes but the first."""
    return Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")


def print_result(sentence: str) -> None:
    """A result in one line."""
    stdout_console().print(Text(sentence), soft_wrap=True)


def print_note(sentence: str) -> None:
    """What a reader may want to know meanwhile."""
    stderr_console().print(Text(sentence), soft_wrap=True)


def print_json(values: Any) -> None:
    """Results as JSON; numbers that are not finite become null."""
    from saobp.storage.json_files import finite

    print(json.dumps(finite(values), indent=1, allow_nan=False))


def print_error(sentence: str) -> None:
    """To stderr, in red on a terminal; only on rank 0."""
    stderr_console().print(Text(sentence, style="red"), soft_wrap=True)


def has_options(context: typer.Context) -> bool:
    """Whether a command was given anything; else it introduces itself."""
    sources = (context.get_parameter_source(name) for name in context.params)
    return any(source is not None and source.name != "DEFAULT" for source in sources)


def fail(problem: BaseException | str) -> NoReturn:
    """Print the error and end the command with exit code 1; in silence if nobody reads stdout."""
    if isinstance(problem, BrokenPipeError):
        raise problem  # typer ends the command
    print_error(problem if isinstance(problem, str) else error_message(problem))
    raise typer.Exit(1) from None


def error_message(problem: BaseException) -> str:
    """An error as one sentence; of an OSError the system's message and the file, without its number."""
    if not isinstance(problem, OSError) or problem.strerror is None:
        return str(problem)
    if problem.filename is None:
        return problem.strerror
    if problem.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{str(problem.filename)!r} cannot be a folder: it is a file, or lies below one"
    return f"{problem.strerror}: {str(problem.filename)!r}"


def check_data_dir(folder: Path | None) -> None:
    """Fail early on a missing folder, not once per run or after a hub lookup."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"the data folder {folder} does not exist: check --data-dir")

"""The two streams of every command: results on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON on stdout, nothing else.")]


def results() -> Console:
    """Stdout; silent in all processes but the first."""
    return Console(quiet=os.environ.get("RANK", "0") != "0")


def notes() -> Console:
    """Stderr; silent in all processes but the first."""
    return Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")


def tell(sentence: str) -> None:
    """A result in one line."""
    results().print(Text(sentence), soft_wrap=True)


def note(sentence: str) -> None:
    """What a reader may want to know meanwhile."""
    notes().print(Text(sentence), soft_wrap=True)


def tell_json(values: Any) -> None:
    """Results as JSON; numbers that are not finite become null."""
    from saobp.storage.json_files import finite

    print(json.dumps(finite(values), indent=1, allow_nan=False))

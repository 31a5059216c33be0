"""``--import``: a module of the user's, such as one that registers a factor."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE",
        help="Python file, or module, that registers a factor of your own. May repeat.",
    ),
]


def import_user_code(names: Sequence[str] | None) -> None:
    """Import files that end in ``.py``, and modules by name; problems become one sentence."""
    for name in names or ():
        if name.endswith(".py") and not Path(name).is_file():
            raise ValueError(f"there is no file {name!r} to import: check --import")
        try:
            _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except Exception as problem:
            raise ValueError(f"--import {name} failed: {type(problem).__name__}: {problem}") from problem


def _import_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise

"""Public names and their parameters stay: all of the committed list exist, and every name is on it."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path

import typer

import saobp
from saobp.cli import app
from saobp.version import __version__

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests/packaging/public_names.txt"
MODULES = ("saobp", "saobp.metrics", "saobp.nn", "saobp.transformers")


def public_names() -> dict[str, list[str]]:
    """Public functions and classes with their parameters, and commands with their options."""
    found = {}
    for module in MODULES:
        loaded = importlib.import_module(module)
        for name in loaded.__all__:
            value = getattr(loaded, name)
            takes = inspect.signature(value).parameters if inspect.isfunction(value) else ()
            found[f"{module}.{name}"] = list(takes)
    for name, command in typer.main.get_group(app).commands.items():
        options = [option for one in command.params for option in one.opts if option.startswith("--")]
        found[f"$ saobp {name}"] = sorted(options)
    return found


def test_public_names_are_the_listed_ones() -> None:
    """Run this file to write the list anew; a name less is a new version in CHANGELOG.md."""
    found = public_names()
    listed = dict(line.split(": ") for line in LIST.read_text().splitlines())
    assert set(listed) == set(found)
    for name, parameters in listed.items():
        assert set(parameters.split()) - {"-"} <= set(found[name]), name


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == saobp.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


if __name__ == "__main__":
    lines = [f"{name}: {' '.join(takes) or '-'}" for name, takes in sorted(public_names().items())]
    LIST.write_text("\n".join(lines) + "\n")

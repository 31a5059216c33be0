"""Texts that come with Python: the prose of its documentation."""

from __future__ import annotations

import ast
import importlib
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

LEAST_CHARACTERS = 40
LEAST_LETTERS = 0.8
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "lib2to3"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_prose(progress: Callable[[int, int], object] = lambda *_: None) -> list[str]:
    """Distinct paragraphs of prose in a fixed shuffled order; ``progress`` gets done and total."""
    found: dict[str, None] = {}
    sources = sorted(
        path for path in Path(sysconfig.get_path("stdlib")).rglob("*.py") if not NOT_READ & set(path.parts)
    )
    for text in (*topics.values(), *compiled_docstrings()):
        found |= dict.fromkeys(paragraphs(text))
    for index, source in enumerate(sources, 1):
        for text in docstrings(source):
            found |= dict.fromkeys(paragraphs(text))
        progress(index, len(sources))
    shuffled = list(found)
    random.Random(0).shuffle(shuffled)
    return shuffled


def docstrings(source: Path) -> Iterator[str]:
    """Docstrings of a Python file; a file that does not parse has none."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def compiled_docstrings() -> Iterator[str]:
    """Docstrings of built-in modules, which have no source to parse."""
    for name in sorted(sys.builtin_module_names):
        owner = importlib.import_module(name)
        members = [owner, *vars(owner).values()]
        for member in (
            *members,
            *(part for value in members if type(value) is type for part in vars(value).values()),
        ):
            if isinstance(text := getattr(member, "__doc__", None), str):
                yield text


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs that look like prose: no grammar or interpreter session, mostly letters."""
    for block in re.split(r"\n\s*\n", text):
        words = " ".join(block.split())
        letters = sum(character.isalpha() or character == " " for character in words)
        if (
            len(words) >= LEAST_CHARACTERS
            and letters >= LEAST_LETTERS * len(words)
            and "::=" not in words
            and ">>>" not in words
        ):
            yield words

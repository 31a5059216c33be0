"""The files of a run: JSON, lines of JSON, and folders whose checksums tell whether they are as written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saobp.storage.atomic import put_in_place, replacing, write_atomically

MANIFEST = "manifest.json"
"""Name of the list of checksums inside a folder that is written whole."""


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON (line {error.lineno}, column {error.colno})") from None


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it gets its name, with a manifest of checksums, only if nothing fails.

    A folder that had the name before is replaced.
    """
    with replacing(path) as folder:
        yield folder
        write_manifest(folder)


def seal(filled: Path, path: Path) -> None:
    """Give a folder that several processes filled its manifest and its name."""
    write_manifest(filled)
    put_in_place(filled, path)


def write_manifest(folder: Path) -> None:
    sums = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            sums[file.relative_to(folder).as_posix()] = hashlib.file_digest(opened, "sha256").hexdigest()
    write_json(folder / MANIFEST, sums)


def flaw(folder: Path) -> str | None:
    """What is wrong with a sealed folder, in words that fit behind 'because'; None if it is whole."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}"
    try:
        sums: Mapping[str, str] = read_json(manifest)
    except (ValueError, OSError):
        return f"its {MANIFEST} cannot be read"
    for name, expected in sums.items():
        try:
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return f"{name} is missing or cannot be read"
        if found != expected:
            return f"{name} is not what was written"
    return None


def append_line(path: Path, content: Mapping[str, Any]) -> None:
    """Add one JSON object to a file of lines."""
    with path.open("a") as file:
        file.write(json.dumps(content) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of lines; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}: line {number}, column {error.colno} is not JSON") from None
    return found


def keep_lines_up_to(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a torn last one."""
    if path.exists():
        kept = [json.dumps(line) for line in read_lines(path) if line["step"] <= step]
        write_atomically(path, "".join(f"{line}\n" for line in kept))

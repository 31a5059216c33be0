"""Files that are whole or absent, whatever moment the process is killed at."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
"""Name of the list of checksums inside a folder that is written whole."""
UNFINISHED = ".unfinished-"
"""How the name of something half written begins."""
FULL_DISK = ("os error 28", "unexpected pos")
"""What safetensors and tokenizers, and torch, say where a disk is full."""


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name, force it to the disk, then give it its name."""
    temporary = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


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
    temporary = path.with_name(f"{UNFINISHED}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        seal(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def seal(filled: Path, path: Path) -> None:
    """Write the manifest of a filled folder, force it to the disk and rename it."""
    sums = {}
    for file in sorted(file for file in filled.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            sums[file.relative_to(filled).as_posix()] = hashlib.file_digest(opened, "sha256").hexdigest()
            os.fsync(opened.fileno())
    write_json(filled / MANIFEST, sums)
    if path.exists():
        old = path.with_name(f"{UNFINISHED}old-{path.name}")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        filled.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        filled.rename(path)
    sync_folder(path.parent)


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


def reason(problem: BaseException) -> str:
    """Why something could not be written; libraries have their own words for a full disk."""
    words = str(problem)
    full = getattr(problem, "errno", None) == errno.ENOSPC or any(sign in words for sign in FULL_DISK)
    return "the disk is full" if full else words


def clear_unfinished(folder: Path) -> None:
    """Remove what a killed process left half written."""
    if folder.is_dir():
        for left in folder.glob(f"{UNFINISHED}*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


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

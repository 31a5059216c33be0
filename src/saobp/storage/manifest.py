"""Folders with a manifest of checksums, which detects damaged files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saobp.storage.atomic import put_in_place, replacing
from saobp.storage.json_files import read_object, write_json

MANIFEST = "manifest.json"
CARD = "README.md"


def file_checksum(file: Path) -> str:
    """SHA-256 of a file's contents."""
    with file.open("rb") as contents:
        return hashlib.file_digest(contents, "sha256").hexdigest()


@contextmanager
def folder_with_manifest(path: Path) -> Iterator[Path]:
    """Context with a folder to fill; gets its manifest and is renamed to ``path`` only if nothing fails.

    Replaces an existing folder.
    """
    with replacing(path) as folder:
        yield folder
        write_manifest(folder)


def seal(filled: Path, path: Path) -> None:
    """Write the manifest of a folder that several processes filled, and rename it."""
    write_manifest(filled)
    put_in_place(filled, path)


def write_manifest(folder: Path) -> None:
    """Checksums of all files but a model card, which is for people to edit, and an earlier manifest."""
    sums = {}
    others = (folder / MANIFEST, folder / CARD)
    files = (file for file in folder.rglob("*") if file.is_file() and file not in others)
    for file in sorted(files):
        sums[file.relative_to(folder).as_posix()] = file_checksum(file)
    write_json(folder / MANIFEST, sums)


def check_manifest(folder: Path) -> None:
    """Raise on a folder that differs from its manifest; one without a manifest passes."""
    difference = damage(folder) if (folder / MANIFEST).exists() else None
    if difference is not None:
        raise ValueError(
            f"the model in {folder} is damaged, because {difference}: restore it or train it again, or "
            f"delete its {MANIFEST} if the change was meant"
        )


def damage(folder: Path) -> str | None:
    """How a folder differs from its manifest, as a clause after 'because'; None if it does not."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}"
    try:
        sums = read_object(manifest)
    except (ValueError, OSError):
        return f"its {MANIFEST} cannot be read"
    for name, expected in sums.items():
        try:
            checksum = file_checksum(folder / name)
        except OSError:
            return f"{name} is missing or cannot be read"
        if checksum != expected:
            return f"{name} is not what was written"
    return None

"""All records of the arena's runs in one file, also while runs are made."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from pathlib import Path

from saobp.runs.layout import CHECKPOINTS, LOCK, MODEL
from saobp.storage.atomic import UNFINISHED, unfinished

FAILED = "failed"
"""In a claim: the run has failed for good."""
BLIMP_ITEMS = "blimp.csv"
"""Likelihoods of all sentences, several megabytes a run, where ``arena_tasks.py`` has evaluated BLiMP."""


def is_record(name: str) -> bool:
    """Whether a file or folder of a run belongs into the pack."""
    return name not in (MODEL, CHECKPOINTS, LOCK, BLIMP_ITEMS) and not name.startswith(UNFINISHED)


def pack(out: Path, file: Path) -> None:
    """Write the records of all runs, without models and BLiMP's items, as folders in a compressed archive.

    Files that are replaced or removed meanwhile are left out. A pack that is there stays until the new one
    is whole.
    """
    paths = [path for path in sorted(out.iterdir()) if path.suffix in (".json", ".txt", ".log")]
    for folder, inner, names in os.walk(out / "runs"):
        inner[:] = filter(is_record, inner)
        paths += [Path(folder, name) for name in filter(is_record, names)]
    paths += out.glob(f"claims/*/{FAILED}")  # so that a choice made without a failed run stays as it is
    with tarfile.open(unfinished(file), "w:xz") as archive:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                entry, content = archive.gettarinfo(path, str(path.relative_to(out))), path.read_bytes()
                entry.size = len(content)  # runs may write meanwhile
                archive.addfile(entry, io.BytesIO(content))
    unfinished(file).replace(file)

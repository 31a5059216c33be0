"""Places for results, looked at before long work."""

from __future__ import annotations

import os
from pathlib import Path


def check_can_write(folder: Path, hint: str = "name another folder") -> None:
    """Raise if a folder could not be made or written to; changes nothing."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"{str(there)!r} is a file: {hint}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{str(there)!r} cannot be written to, for lack of permission: {hint}")

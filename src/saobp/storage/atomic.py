"""Atomic writes: files and folders that are complete or absent whenever the process is killed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

UNFINISHED = ".unfinished-"
"""Name prefix of an incomplete file or folder, next to its destination."""
REPLACED = f"{UNFINISHED}old-"
"""Name prefix of a folder while it is being replaced."""
ADDED = f"{UNFINISHED}files"
"""Name of the folder with files that are to be added to the one that it is in."""
NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than the limit that is set for files (ulimit -f)",
}


def unfinished(path: Path) -> Path:
    """The name of a file or folder while it is written."""
    return path.with_name(f"{UNFINISHED}{path.name}")


def is_unfinished(path: Path) -> bool:
    return path.name.startswith(UNFINISHED)


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file, fsync, then rename."""
    temporary = unfinished(path)
    try:
        with naming(path):
            temporary.write_text(text, encoding="utf-8")
            fsync(temporary)
            temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context that adds the file name to OSErrors, which those of writes lack."""
    try:
        yield
    except OSError as problem:
        if problem.errno is not None and problem.filename is None:
            problem.filename = str(path)
        raise


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Context with an empty folder that replaces ``folder`` if nothing fails."""
    new = unfinished(folder)
    _remove(new)
    new.mkdir(parents=True)
    try:
        yield new
        put_in_place(new, folder)
    except BaseException:
        _remove(new)
        raise


@contextmanager
def adding_to(folder: Path, outdated: Sequence[str] = (), last: str = "") -> Iterator[Path]:
    """Context with an empty folder whose files move into an existing ``folder`` if nothing fails.

    They replace files of the same names and those that match ``outdated``; others stay. The file called
    ``last`` is taken away first and comes last, so that it is missing, rather than beside files of another
    save, if the process is killed in between.
    """
    new = folder / ADDED
    _remove(new)
    new.mkdir()
    try:
        yield new
        files = [path for path in new.rglob("*") if path.is_file()]
        for path in files:
            fsync(path)
        for pattern in (last, *outdated) if last else outdated:
            for path in folder.glob(pattern):
                path.unlink()
        for path in sorted(files, key=lambda path: path == new / last):
            place = folder / path.relative_to(new)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
        fsync(folder)
    finally:
        _remove(new)


def put_in_place(new: Path, folder: Path) -> None:
    """fsync a filled folder, then rename it; replaces an existing one."""
    for path in (*new.rglob("*"), new):
        fsync(path)
    old = folder.with_name(f"{REPLACED}{folder.name}")
    if folder.exists():
        _remove(old)
        folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise
    fsync(folder.parent)
    _remove(old)


def clear_unfinished(folder: Path) -> None:
    """Remove incomplete files of a killed process; restore a folder that it was about to replace."""
    for left in folder.glob(f"{UNFINISHED}*"):
        original = left.with_name(left.name.removeprefix(REPLACED))
        if left.name.startswith(REPLACED) and not original.exists():
            left.rename(original)
        else:
            _remove(left)


def reason(problem: BaseException) -> str:
    """Why a write failed; normalises the libraries' messages for a full disk."""
    message, number = str(problem), getattr(problem, "errno", None)
    for code, plain in NO_ROOM.items():
        if number == code or f"os error {code}" in message:
            return plain
    if "unexpected pos" in message:  # torch, which does not say why
        return NO_ROOM[errno.EFBIG if _files_are_limited() else errno.ENOSPC]
    return message


def first_line(problem: BaseException) -> str:
    """First line of an exception's message; its type if that is empty."""
    return str(problem).strip().partition("\n")[0] or type(problem).__name__


def _files_are_limited() -> bool:
    return resource is not None and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY


def fsync(path: Path) -> None:
    """fsync a file or, where supported, a folder."""
    if os.name == "nt":
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(opened)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

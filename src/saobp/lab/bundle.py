"""Bring runs home from a machine that gives little back: small files in one archive, models in one each.

Only what is finished is packed, and checkpoints never are. Models stay behind unless they are asked for. An
archive is cut into parts that carry its checksum and their number, as in ``runs-1a2b3c4d.1of2.tar.xz``, so
that a process may be killed at any moment: an archive of which all parts are there is whole.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from saobp.lab.plan import is_named
from saobp.runs.layout import RESULT, SEED
from saobp.runs.manifest import MANIFEST, folder_with_manifest
from saobp.storage.atomic import is_unfinished, unfinished

WEIGHTS = "model.safetensors"
SMALL = "runs"
PART_BYTES = 15 * 2**20
"""Of one file of an archive."""
PART = re.compile(r"(?P<label>.+)-(?P<sum>[0-9a-f]{8})\.(?P<part>\d+)of(?P<parts>\d+)\.tar\.xz")
EVERY_SECONDS = 15.0


def keep_rounded(model: Path) -> None:
    """Round the matrices of a saved model to bfloat16, in place; loading makes float32 of them again.

    Vectors, among them norms and learned strengths, keep their precision.
    """
    weights = load_file(model / WEIGHTS)
    rounded = {
        name: tensor.bfloat16() if tensor.ndim > 1 and tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    with folder_with_manifest(model) as folder:
        for file in model.iterdir():
            if file.name not in (WEIGHTS, MANIFEST):
                shutil.copy2(file, folder / file.name)
        save_file(
            {name: tensor.contiguous() for name, tensor in rounded.items()},
            folder / WEIGHTS,
            {"format": "pt"},
        )


def is_rounded(model: Path) -> bool:
    """Whether a saved model was rounded."""
    with safe_open(model / WEIGHTS, "pt") as weights:
        return any(weights.get_slice(name).get_dtype() == "BF16" for name in weights.keys())  # noqa: SIM118


def small_files(runs: Path) -> list[Path]:
    """Files of finished runs, fine-tuning and measurements but models, relative to the folder of runs."""
    folders = [path.parent for path in runs.glob(f"*/{RESULT}")]
    folders += [path.parent for path in runs.glob(f"tasks/*/*/{SEED}*/{RESULT}")]
    found = [file for folder in folders for file in folder.iterdir() if file.is_file()]
    found += [*runs.glob(f"tasks/*/*/{RESULT}"), *runs.glob("measured/*/*.json")]
    return sorted(file.relative_to(runs) for file in found if not is_unfinished(file))


def pack(
    runs: Path, out: Path, *, models: str = "", rounded: bool = False, part_bytes: int = PART_BYTES
) -> list[Path]:
    """Bring the archives in ``out`` up to date; the new files.

    models: also of finished runs of such a name, each in an archive of its own; with ``rounded`` only once
    they are.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = _archive(out, SMALL, runs, small_files(runs), part_bytes)
    for result in sorted(runs.glob(f"*/{RESULT}")):
        run = result.parent
        ready = is_named(run.name, models) and (run / "model" / WEIGHTS).exists()
        if ready and (not rounded or is_rounded(run / "model")):
            files = [file.relative_to(runs) for file in sorted((run / "model").iterdir())]
            written += _archive(out, f"{run.name}-model", runs, files, part_bytes)
    return written


def _archive(out: Path, label: str, runs: Path, files: Sequence[Path], part_bytes: int) -> list[Path]:
    """One archive in parts, then without its predecessors; nothing where it is there already."""
    stamps = [(file.as_posix(), *_stamp(runs / file)) for file in files]
    mark = hashlib.sha256(repr(stamps).encode()).hexdigest()[:8]
    before = [
        path for path in out.iterdir() if (name := PART.fullmatch(path.name)) and name["label"] == label
    ]
    if not files or any(name["sum"] == mark for name in _whole(before)):
        return []
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=0) as archive:
        for file in files:
            archive.add(runs / file, arcname=file.as_posix())
    packed = buffer.getvalue()
    pieces = [packed[start : start + part_bytes] for start in range(0, len(packed), part_bytes)]
    written = []
    for number, piece in enumerate(pieces, 1):
        path = out / f"{label}-{mark}.{number}of{len(pieces)}.tar.xz"
        temporary = unfinished(path)
        temporary.write_bytes(piece)
        written.append(temporary.replace(path))
    for path in set(before) - set(written):
        path.unlink()
    return written


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _whole(paths: Sequence[Path]) -> list[re.Match[str]]:
    """The first part of every archive of which all parts are there."""
    parts = [name for path in paths if (name := PART.fullmatch(path.name))]
    kinds = [(name["label"], name["sum"], name["parts"]) for name in parts]
    return [
        name
        for name, kind in zip(parts, kinds, strict=True)
        if name["part"] == "1" and kinds.count(kind) == int(name["parts"])
    ]


@contextmanager
def kept_packed(
    runs: Path,
    out: Path,
    *,
    models: str = "",
    rounded: bool = False,
    say: Callable[[str], object] = print,
    every: float = EVERY_SECONDS,
) -> Iterator[None]:
    """Meanwhile pack whatever is finished every few seconds, and once more at the end."""
    ended = threading.Event()

    def once() -> list[Path]:
        try:
            return pack(runs, out, models=models, rounded=rounded)
        except OSError as problem:
            say(f"{runs} could not be packed into {out}: {problem}")
            return []

    def repeat() -> None:
        while not ended.wait(every):
            once()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        once()
        size = sum(path.stat().st_size for path in out.iterdir()) if out.is_dir() else 0
        say(f"packed into {out}: {size / 2**20:.1f} MiB")


def unpack(folder: Path, runs: Path, say: Callable[[str], object] = print) -> list[str]:
    """Put what was packed into a folder of runs; names of the files. ``say`` gets those left out."""
    here = {path.name: path for path in sorted(folder.rglob("*.tar.xz")) if PART.fullmatch(path.name)}
    if not here:
        raise ValueError(
            f"there is nothing to unpack in {folder}: --pack writes files such as {SMALL}-*.tar.xz"
        )
    runs.mkdir(parents=True, exist_ok=True)
    whole = _whole(list(here.values()))
    known = {(name["label"], name["sum"]) for name in whole}
    for file in here:
        name = PART.fullmatch(file)
        assert name is not None
        if (name["label"], name["sum"]) not in known:
            say(f"{file} is left out, because not all of its {name['parts']} parts are there")
    names = []
    for first in whole:
        label, mark, count = first["label"], first["sum"], int(first["parts"])
        packed = b"".join(
            here[f"{label}-{mark}.{number}of{count}.tar.xz"].read_bytes() for number in range(1, count + 1)
        )
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as archive:
            names += archive.getnames()
            archive.extractall(runs, filter="data")
    return names

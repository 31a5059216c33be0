"""Bring runs home from a machine that gives little back: small folders, packed into a few files.

Checkpoints stay behind. Models stay behind too unless they are asked for; then their matrices are rounded to
bfloat16, which halves them. Vectors, among them norms and learned strengths, keep their precision.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from saobp.training.files import MANIFEST, UNFINISHED, whole_folder

WEIGHTS = "model.safetensors"
PART_BYTES = 15 * 2**20
"""Of one file of a packed folder."""
PACKED = "runs.tar.xz"
NOT_RUNS = ("tokens", "data", "results", "logs")
"""What may lie beside runs and stays behind."""


def keep_rounded(model: Path) -> None:
    """Round the matrices of a saved model to bfloat16, in place; loading makes float32 of them again."""
    weights = load_file(model / WEIGHTS)
    rounded = {
        name: tensor.bfloat16() if tensor.ndim > 1 and tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    with whole_folder(model) as folder:
        for file in model.iterdir():
            if file.name not in (WEIGHTS, MANIFEST):
                shutil.copy2(file, folder / file.name)
        save_file(
            {name: tensor.contiguous() for name, tensor in rounded.items()},
            folder / WEIGHTS,
            {"format": "pt"},
        )


def small_files(runs: Path, models: str = "") -> list[Path]:
    """Files of a folder of runs that are worth taking along, relative to it; models of runs named so."""
    return [
        path.relative_to(runs)
        for path in sorted(runs.rglob("*"))
        if path.is_file() and _is_wanted(path.relative_to(runs).parts, models)
    ]


def _is_wanted(parts: tuple[str, ...], models: str) -> bool:
    if parts[0] in NOT_RUNS or "checkpoints" in parts or any(part.startswith(UNFINISHED) for part in parts):
        return False
    return "model" not in parts or fnmatch(parts[0], models)


def pack(runs: Path, out: Path, *, models: str = "", part_bytes: int = PART_BYTES) -> list[Path]:
    """``runs.tar.xz.00``, ``.01``, ... in ``out``: joined, they are one archive of the small files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=1) as archive:
        for name in small_files(runs, models):
            archive.add(runs / name, arcname=name.as_posix())
    packed = buffer.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for number, start in enumerate(range(0, len(packed), part_bytes)):
        path = out / f"{PACKED}.{number:02d}"
        path.write_bytes(packed[start : start + part_bytes])
        written.append(path)
    return written


def unpack(parts: Iterable[Path], runs: Path) -> list[str]:
    """Put what was packed into a folder of runs; names of the files."""
    packed = b"".join(path.read_bytes() for path in sorted(parts))
    if not packed:
        raise ValueError(f"there is nothing to unpack: give files called {PACKED}.00 and so on")
    runs.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as archive:
        names = archive.getnames()
        archive.extractall(runs, filter="data")
    return names


def is_rounded(model: Path) -> bool:
    """Whether a saved model was rounded."""
    return any(tensor.dtype == torch.bfloat16 for tensor in load_file(model / WEIGHTS).values())

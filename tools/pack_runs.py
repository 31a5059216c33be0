"""Pack the runs of ``saobp reproduce`` on a machine with limited time and transfer size.

    python tools/pack_runs.py pack RUNS ARCHIVES      pack what is finished, without models
    python tools/pack_runs.py unpack ARCHIVES RUNS    put packed runs into a folder of runs
    python tools/pack_runs.py while RUNS ARCHIVES --minutes 9 -- saobp reproduce gtd --runs RUNS ...

``while`` runs a command, packs finished runs meanwhile, and interrupts it before the time is over; the same
command later resumes from its last checkpoints.

Finished runs are packed without checkpoints: small files in one archive, each model that ``--models`` names
in one of its own (``--rounded``: matrices in bfloat16). An archive is split into parts that carry its
checksum and their number, as in ``runs-1a2b3c4d.1of2.tar.xz``; it is complete as soon as all its parts are
there, so the process may be killed at any moment.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import lzma
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from safetensors.torch import load_file, save_file

from saobp.lab.experiment_plan import matches
from saobp.runs.layout import MODEL, RESULT, SEED
from saobp.storage.atomic import is_unfinished, unfinished
from saobp.storage.manifest import MANIFEST, folder_with_manifest

WEIGHTS = "model.safetensors"
SMALL_FILES = "runs"
PART_BYTES = 15 * 2**20
PART = re.compile(r"(?P<label>.+)-(?P<sum>[0-9a-f]{8})\.(?P<part>\d+)of(?P<parts>\d+)\.tar\.xz")
UNPACKED_BYTES = 16 * 2**30
"""Most bytes that one archive may unpack to."""
PACK_SECONDS = 15.0
GRACE_SECONDS = 10.0
"""Seconds between the interruption of a command and its end."""


def pack(
    runs: Path, out: Path, *, models: str = "", rounded: bool = False, part_bytes: int = PART_BYTES
) -> list[Path]:
    """Bring the archives in ``out`` up to date; returns the new files."""
    out.mkdir(parents=True, exist_ok=True)
    written = _write_archive(out, SMALL_FILES, runs, small_files(runs), part_bytes)
    for result in sorted(runs.glob(f"*/{RESULT}")):
        model = result.parent / MODEL
        if matches(result.parent.name, models) and (model / WEIGHTS).exists():
            files = [file.relative_to(runs) for file in sorted(model.iterdir())]
            content = functools.partial(rounded_copy, model, runs) if rounded else None
            label = f"{result.parent.name}-model"
            written += _write_archive(out, label, runs, files, part_bytes, content)
    return written


def small_files(runs: Path) -> list[Path]:
    """Files of finished runs, fine-tuning and measurements except models, relative to the folder of runs."""
    folders = [path.parent for path in runs.glob(f"*/{RESULT}")]
    folders += [path.parent for path in runs.glob(f"tasks/*/*/{SEED}*/{RESULT}")]
    found = [file for folder in folders for file in folder.iterdir() if file.is_file()]
    found += [*runs.glob(f"tasks/*/*/{RESULT}"), *runs.glob("measured/*/*.json")]
    return sorted(file.relative_to(runs) for file in found if not is_unfinished(file))


@contextmanager
def rounded_copy(model: Path, runs: Path) -> Iterator[Path]:
    """A folder with a copy of the model in which matrices are bfloat16; vectors keep their precision."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / model.relative_to(runs)
        copy.parent.mkdir(parents=True)
        with folder_with_manifest(copy) as folder:
            for file in model.iterdir():
                if file.name not in (WEIGHTS, MANIFEST):
                    shutil.copy2(file, folder / file.name)
            weights = {
                name: tensor.bfloat16() if tensor.ndim > 1 and tensor.is_floating_point() else tensor
                for name, tensor in load_file(model / WEIGHTS).items()
            }
            save_file(weights, folder / WEIGHTS, {"format": "pt"})
        yield Path(temporary)


def _write_archive(
    out: Path,
    label: str,
    runs: Path,
    files: Sequence[Path],
    part_bytes: int,
    content: Callable[[], AbstractContextManager[Path]] | None = None,
) -> list[Path]:
    """Write one archive in parts and delete its predecessors; does nothing if it exists.

    ``content`` opens another folder to read the files from, by default that of the runs.
    """
    stamps = [(file.as_posix(), (stat := (runs / file).stat()).st_size, stat.st_mtime_ns) for file in files]
    checksum = hashlib.sha256(repr(stamps).encode()).hexdigest()[:8]
    before = [
        path for path in out.iterdir() if (name := PART.fullmatch(path.name)) and name["label"] == label
    ]
    if not files or any(name["sum"] == checksum for name in _complete(before)):
        return []
    buffer = io.BytesIO()
    opened = nullcontext(runs) if content is None else content()
    with opened as root, tarfile.open(fileobj=buffer, mode="w:xz", preset=0) as archive:
        for file in files:
            archive.add(root / file, arcname=file.as_posix())
    packed = buffer.getvalue()
    parts = [packed[start : start + part_bytes] for start in range(0, len(packed), part_bytes)]
    written = []
    for number, part in enumerate(parts, 1):
        path = out / f"{label}-{checksum}.{number}of{len(parts)}.tar.xz"
        temporary = unfinished(path)
        temporary.write_bytes(part)
        written.append(temporary.replace(path))
    for path in set(before) - set(written):
        path.unlink()
    return written


def _complete(paths: Sequence[Path]) -> list[re.Match[str]]:
    """The first part of every complete archive."""
    parts = [name for path in paths if (name := PART.fullmatch(path.name))]
    kinds = [(name["label"], name["sum"], name["parts"]) for name in parts]
    return [
        name
        for name, kind in zip(parts, kinds, strict=True)
        if name["part"] == "1" and kinds.count(kind) == int(name["parts"])
    ]


def unpack(
    folder: Path,
    runs: Path,
    notify: Callable[[str], object] = print,
    most_bytes: int = UNPACKED_BYTES,
) -> list[str]:
    """Put the archives in and below ``folder`` into a folder of runs; returns the names of the files.

    ``notify`` names incomplete archives, which are left out. Raises ValueError on a damaged one, and on one
    that would unpack to more than ``most_bytes``, before anything of it is written.
    """
    here = {path.name: path for path in sorted(folder.rglob("*.tar.xz")) if PART.fullmatch(path.name)}
    if not here:
        raise ValueError(f"there is no archive in {folder}: pack writes files such as {SMALL_FILES}-*.tar.xz")
    runs.mkdir(parents=True, exist_ok=True)
    complete = _complete(list(here.values()))
    known = {(name["label"], name["sum"]) for name in complete}
    for file in here:
        name = PART.fullmatch(file)
        assert name is not None
        if (name["label"], name["sum"]) not in known:
            notify(f"{file} is left out, because not all of its {name['parts']} parts are there")
    names = []
    for first in complete:
        label, checksum, count = first["label"], first["sum"], int(first["parts"])
        parts = [here[f"{label}-{checksum}.{number}of{count}.tar.xz"] for number in range(1, count + 1)]
        try:
            names += _extract(b"".join(part.read_bytes() for part in parts), runs, most_bytes)
        except (tarfile.TarError, lzma.LZMAError, EOFError) as problem:
            raise ValueError(f"{parts[0]} is damaged ({problem}): copy the archive again") from None
        except ValueError as problem:
            raise ValueError(f"{parts[0]} {problem}") from None
    return names


def _extract(packed: bytes, runs: Path, most_bytes: int) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as archive:
        members, size = [], 0
        for member in archive:
            members.append(member)
            size += member.size
            if size > most_bytes:
                raise ValueError(
                    f"would unpack to more than {most_bytes / 2**30:g} GiB: check it, or raise --most"
                )
        archive.extractall(runs, members, filter="data")
    return [member.name for member in members]


def run_while_packing(
    command: Sequence[str], runs: Path, out: Path, minutes: float, *, models: str = "", rounded: bool = False
) -> int:
    """Run a command, pack what it finishes every few seconds, and interrupt it before the time is over.

    Returns its exit code.
    """
    end = time.monotonic() + 60 * minutes - GRACE_SECONDS
    child = subprocess.Popen(command)
    is_interrupted = False
    try:
        while child.poll() is None:
            left = end - time.monotonic()
            if left <= 0 and not is_interrupted:
                child.send_signal(signal.SIGINT)
                is_interrupted = True
            try:
                child.wait(GRACE_SECONDS if is_interrupted else min(left, PACK_SECONDS))
            except subprocess.TimeoutExpired:
                if is_interrupted:
                    child.kill()
                else:
                    pack(runs, out, models=models, rounded=rounded)
    finally:
        if child.poll() is None:
            child.kill()
        code = child.wait()
        pack(runs, out, models=models, rounded=rounded)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    packing = commands.add_parser("pack", help="pack what is finished")
    running = commands.add_parser("while", help="pack while a command runs, and interrupt it in time")
    for sub in (packing, running):
        sub.add_argument("runs", type=Path)
        sub.add_argument("archives", type=Path)
        sub.add_argument("--models", default="", help="pack models of runs of such names: '*-seed42'")
        sub.add_argument("--rounded", action="store_true", help="pack matrices of models in bfloat16")
    running.add_argument("--minutes", type=float, required=True)
    running.add_argument("command", nargs="+", help="after --")
    unpacking = commands.add_parser("unpack", help="put packed runs into a folder of runs")
    unpacking.add_argument("archives", type=Path)
    unpacking.add_argument("runs", type=Path)
    unpacking.add_argument("--most", type=int, default=UNPACKED_BYTES, help="bytes an archive may unpack to")
    given = parser.parse_args(arguments)
    try:
        if given.what == "unpack":
            print(f"unpacked {len(unpack(given.archives, given.runs, most_bytes=given.most))} files")
        elif given.what == "pack":
            print(
                f"wrote {len(pack(given.runs, given.archives, models=given.models, rounded=given.rounded))}"
            )
        else:
            return run_while_packing(
                given.command,
                given.runs,
                given.archives,
                given.minutes,
                models=given.models,
                rounded=given.rounded,
            )
    except (ValueError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

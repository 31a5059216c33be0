"""Read a task from a data folder or from the hub, check it, and note differences from the official one."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from saobp.data.tasks.catalogue import TaskSpec, get_task
from saobp.data.tasks.checks import WrongRowsError, check_overlap, check_rows
from saobp.storage.atomic import first_line
from saobp.storage.manifest import file_checksum


@dataclass(frozen=True)
class Split:
    """Checked rows of one split. ``official`` is its official row count, ``rows`` what the file holds."""

    name: str
    source: str
    checksum: str
    table: pa.Table
    labels: np.ndarray
    rows: int
    official: int
    is_official: bool

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> list[Any]:
        return self.table[name].to_pylist()

    @property
    def note(self) -> str | None:
        """One sentence on how it differs from the official split."""
        if self.is_official:
            return None
        stem = Path(self.source).stem
        named = self.name if stem == self.name else f"{self.name} ({stem})"
        return f"{named} has {self.rows} rows, official {self.official}"

    def sample(self, limit: int | None) -> Split:
        """A fixed random sample of at most ``limit`` rows."""
        if limit is None or limit >= len(self):
            return self
        return self.take(np.sort(np.random.default_rng(0).permutation(len(self))[:limit]))

    def take(self, chosen: np.ndarray) -> Split:
        """Rows by index."""
        return replace(self, table=self.table.take(pa.array(chosen)), labels=self.labels[chosen])


@dataclass(frozen=True)
class Task:
    """A task with its rows. ``notes`` says in sentences how it differs from the official one."""

    spec: TaskSpec
    train: Split
    validation: Split
    notes: tuple[str, ...]

    @property
    def partial(self) -> bool:
        """Whether rows are missing or replaced: scores are then not comparable with published ones."""
        whole = len(self.train) == self.train.rows and len(self.validation) == self.validation.rows
        return not (self.train.is_official and self.validation.is_official and whole)

    def describe(self) -> dict[str, Any]:
        """Row counts and notes for a record."""
        splits = {"train": self.train, "validation": self.validation}
        return {
            "partial": self.partial,
            "rows": {name: len(split) for name, split in splits.items()},
            "official_rows": {name: split.official for name, split in splits.items()},
            "files": {name: Path(split.source).name for name, split in splits.items()},
            "notes": list(self.notes),
        }


def load_task(name: str | TaskSpec, data_dir: str | Path | None = None, *, limit: int | None = None) -> Task:
    """Training and validation rows of a task, from ``data_dir`` or, without one, from the hub.

    A partial training set (``train_subset*``) is taken where the full one is absent. ``limit`` takes a fixed
    random sample of so many rows per split.
    """
    spec = name if isinstance(name, TaskSpec) else get_task(name)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    train, validation = load_split(spec, "train", data_dir), load_split(spec, "validation", data_dir)
    overlap = check_overlap(train.table, validation.table, spec, (train.source, validation.source))
    stand_in = spec.stand_ins.get(Path(validation.source).stem)
    notes = [note for note in (train.note, validation.note, stand_in, overlap) if note]
    if limit is not None and limit < max(train.rows, validation.rows):
        notes.append(f"only {limit} examples of each split are used")
    return Task(spec, train.sample(limit), validation.sample(limit), tuple(notes))


def load_split(spec: TaskSpec, split: str, data_dir: str | Path | None = None) -> Split:
    """Checked rows of one split (``train``, ``validation`` or another that the task has)."""
    if split not in spec.official:
        raise ValueError(f"{spec.name} has no split {split!r}: it has {', '.join(spec.official)}")
    if data_dir is None:
        table = read_hub(spec, split)
        source, checksum = f"{spec.hub[0]}/{split}", table_checksum(table)
        named_officially = True
    else:
        path = find_file(spec, split, Path(data_dir))
        table, source = read_table(path), str(path)
        checksum = file_checksum(path)
        named_officially = path.stem == spec.files(split)[0]
    labels = check_rows(table, spec, source)
    official = spec.official[split]
    is_official = named_officially and table.num_rows == official
    return Split(split, source, checksum, table, labels, table.num_rows, official, is_official)


def find_file(spec: TaskSpec, split: str, data_dir: Path) -> Path:
    """The file of a split: the official one, else a partial one."""
    if not data_dir.is_dir():
        raise FileNotFoundError(f"there is no data folder {str(data_dir)!r}")
    folder = data_dir / spec.folder
    for name in spec.files(split):
        matches = sorted(folder.glob(f"{name}.parquet"))
        if matches:
            return matches[0]
    names = " or ".join(f"{name}.parquet" for name in spec.files(split))
    raise FileNotFoundError(f"{spec.name} needs {names} in {str(folder)!r}, and there is none")


def read_table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as problem:
        raise WrongRowsError(f"{path} cannot be read as a parquet file: {first_line(problem)}") from None


def table_checksum(table: pa.Table) -> str:
    digest = hashlib.sha256()
    for column in table.combine_chunks().columns:
        for value in column.to_pylist():
            digest.update(repr(value).encode())
    return digest.hexdigest()


_SPLITS = {("mnli", "validation"): "validation_matched"}


def read_hub(spec: TaskSpec, split: str) -> pa.Table:
    """Rows of a split by the ``datasets`` library, which is imported here and nowhere else in this folder."""
    from datasets import load_dataset

    path, name = spec.hub
    try:
        rows = load_dataset(path, name, split=_SPLITS.get((spec.name, split), split))
    except Exception as problem:
        raise FileNotFoundError(
            f"the hub could not give {spec.name} ({first_line(problem)}): give a data folder by --data-dir"
        ) from problem
    table = rows.data.table if hasattr(rows.data, "table") else rows.with_format("arrow")[:]
    return clean_hellaswag(table) if spec.name == "hellaswag" else table


def clean_hellaswag(table: pa.Table) -> pa.Table:
    """HellaSwag's raw rows without the marks of its source (``[title]``, ``[step]``), labels as numbers."""
    rows: list[dict[str, Any]] = table.to_pylist()
    return pa.table(
        {
            "ctx": [_without_marks(f"{row['ctx_a']} {row['ctx_b'].capitalize()}") for row in rows],
            "endings": [[_without_marks(ending) for ending in row["endings"]] for row in rows],
            "label": [int(row["label"]) for row in rows],
        }
    )


def _without_marks(text: str) -> str:
    titled = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", titled).replace("  ", " ").strip()

"""Text corpora: parquet files, text files, or a dataset of the hub, as a stream of checked documents."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from saobp.data.readers import cut_row, parquet_bytes, parquet_rows, text_documents
from saobp.storage.atomic import first_line

COLUMN = "text"
SPLITS = ("train", "validation", "test")
FORMATS = (".parquet", ".txt")
TITLE = re.compile(r" = [^=].* = \n?")
"""A WikiText line that opens an article; sections have more equals signs."""

_READING = b"saobp corpus 1\n"
"""Format version, part of every checksum: bump it when the same files yield other documents."""


class Corpus(ABC):
    """Documents in a fixed order, streamed from the source on every iteration.

    name: as given by the user; size: approximate bytes of text
    """

    name: str

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """Every document that is not blank, validated while streaming."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Approximate bytes of text, for progress bars."""

    @property
    @abstractmethod
    def checksum(self) -> str:
        """SHA-256 over the contents."""


@dataclass(frozen=True)
class Documents:
    """Re-iterable stream over the documents of several corpora."""

    corpora: tuple[Corpus, ...]

    def __iter__(self) -> Iterator[str]:
        for corpus in self.corpora:
            yield from corpus.documents()

    @property
    def size(self) -> int:
        """Approximate bytes of text."""
        return sum(corpus.size for corpus in self.corpora)


@dataclass(frozen=True)
class FileCorpus(Corpus):
    """Parquet files with a column ``text``, or text files, each of which is a document."""

    name: str
    files: tuple[Path, ...]

    def documents(self) -> Iterator[str]:
        has_text = False
        for file in self.files:
            read = _parquet_documents if _kind(file) == ".parquet" else text_documents
            for document in read(file):
                has_text = True
                yield document
        if not has_text:
            raise ValueError(f"corpus {self.name} holds no text: every document in its files is blank")

    @property
    def size(self) -> int:
        return sum(
            parquet_bytes(file, COLUMN) if _kind(file) == ".parquet" else file.stat().st_size
            for file in self.files
        )

    @cached_property
    def checksum(self) -> str:
        whole = hashlib.sha256(_READING)
        for file in self.files:
            with file.open("rb") as contents:
                whole.update(_kind(file).encode() + hashlib.file_digest(contents, "sha256").digest())
        return whole.hexdigest()


@dataclass(frozen=True)
class HubCorpus(Corpus):
    """One split of a dataset of the hub, already on this machine; ``rows`` is its text column."""

    name: str
    rows: Any
    size: int = 0

    def documents(self) -> Iterator[str]:
        has_text = False
        for document in joined_articles(self._texts()):
            has_text = True
            yield from cut_row(document)
        if not has_text:
            raise ValueError(f"dataset {self.name} holds no text: every row of column {COLUMN!r} is blank")

    def _texts(self) -> Iterator[str]:
        for number, row in enumerate(self.rows, 1):
            if not isinstance(row[COLUMN], str):
                raise ValueError(
                    f"row {number} of column {COLUMN!r} in dataset {self.name} is {row[COLUMN]!r}, not text"
                )
            yield row[COLUMN]

    @cached_property
    def checksum(self) -> str:
        whole = hashlib.sha256(_READING)
        for text in self._texts():
            encoded = text.encode("utf-8", "surrogatepass")
            whole.update(len(encoded).to_bytes(8, "little") + encoded)
        return whole.hexdigest()


def open_corpus(name: str | Path, data_dir: str | Path | None = None, split: str | None = None) -> Corpus:
    """A corpus by path, by the name of a folder in ``data_dir``, or by its name on the hub.

    Where files are named by split (``train.parquet``), only those of ``split`` are read, by default train;
    otherwise the whole folder is the training text and has no other split.
    """
    if split is not None and split not in SPLITS:
        raise ValueError(f"a split is one of {', '.join(SPLITS)}, not {split!r}")
    for path in (Path(name), *([] if data_dir is None else [Path(data_dir, name)])):
        if path.exists():
            return FileCorpus(str(name), _files_of(path, split))
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"the data folder {data_dir} does not exist")
    if _kind(Path(name)) in FORMATS or Path(name).is_absolute():  # no name on the hub: it need not be asked
        raise FileNotFoundError(f"there is no file or folder {str(name)!r}{_nor_in(data_dir)}")
    return _from_hub(str(name), data_dir, split)


def parse_mixture(text: str) -> dict[str, float | None]:
    """Read ``"a:0.5,b:0.5"`` into shares that sum to 1; ``"a,b"`` gives None: proportional to size."""
    weights: dict[str, float | None] = {}
    for part in (part.strip() for part in text.split(",")):
        name, colon, number = part.rpartition(":")
        weight: float | None = None
        try:
            weight = float(number) if colon else None
        except ValueError:
            name, colon = part, ""
        name = name if colon else part
        if not name:
            raise ValueError(f"the mixture {text!r} has an empty name: write 'a:0.5,b:0.5' or 'a,b'")
        if name in weights:
            raise ValueError(f"the mixture {text!r} names {name!r} twice")
        if weight is not None and not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of {name!r} must be above 0, not {number}")
        weights[name] = weight
    numbers = [weight for weight in weights.values() if weight is not None]
    if not numbers:
        return weights
    if len(numbers) < len(weights):
        missing = ", ".join(name for name, weight in weights.items() if weight is None)
        raise ValueError(f"the mixture {text!r} gives no weight for {missing}: weigh all corpora or none")
    total = sum(numbers)
    return {name: (weight or 0.0) / total for name, weight in weights.items()}


def joined_articles(rows: Iterable[str]) -> Iterator[str]:
    """Documents from rows: as they are, or joined to articles where the first is a WikiText title line.

    A title stands between blank rows; a table's lines can look like one.
    """
    lines: list[str] = []
    waiting: list[str] = []
    is_wikitext: bool | None = None
    after_blank = True
    for row in rows:
        is_blank = not row.strip()
        if waiting:
            if is_blank and lines:
                yield "".join(lines)
                lines = []
            lines.append(waiting.pop())
        if is_blank:
            after_blank = True
            continue
        is_title = TITLE.fullmatch(row) is not None
        if is_wikitext is None:
            is_wikitext = is_title
        if not is_wikitext:
            yield row
            continue
        (waiting if is_title and after_blank else lines).append(row if row.endswith("\n") else row + "\n")
        after_blank = False
    if lines or waiting:
        yield "".join(lines + waiting)


def _parquet_documents(file: Path) -> Iterator[str]:
    for document in joined_articles(parquet_rows(file, COLUMN)):
        yield from cut_row(document)


def _kind(file: Path) -> str:
    """File format by suffix, case-insensitive."""
    return file.suffix.lower()


def _nor_in(data_dir: str | Path | None) -> str:
    return "" if data_dir is None else f", nor one in {data_dir}"


def _files_of(path: Path, split: str | None) -> tuple[Path, ...]:
    if path.is_file():
        if _kind(path) not in FORMATS:
            raise ValueError(f"{path} is neither .parquet nor .txt")
        files = [path]
    else:
        there = sorted(file for file in path.rglob("*") if file.is_file())
        files = [file for file in there if _kind(file) == ".parquet"]
        files = files or [file for file in there if _kind(file) == ".txt"]
        if not files:
            raise FileNotFoundError(f"the folder {path} holds neither .parquet nor .txt files")
        by_split = {name: [f for f in files if re.split(r"[-_.]", f.name)[0] == name] for name in SPLITS}
        if any(by_split.values()):
            files = by_split[split or "train"]
            if not files:
                others = ", ".join(name for name, members in by_split.items() if members)
                raise FileNotFoundError(f"{path} has no file of split {split or 'train'}, only of {others}")
            return tuple(files)
    if split not in (None, "train"):
        raise ValueError(
            f"{path} is not divided into splits, so it has no {split!r}: it is all training text"
        )
    return tuple(files)


def _from_hub(name: str, data_dir: str | Path | None, split: str | None) -> Corpus:
    from datasets import load_dataset

    where = f"is no file or folder{_nor_in(data_dir)}"
    repository, _, config = name.partition("@")
    try:
        rows = load_dataset(repository, config or None, split=split or "train")
    except Exception as problem:
        raise FileNotFoundError(
            f"{name!r} {where}, and the hub could not give it ({first_line(problem)})"
        ) from problem
    if COLUMN not in rows.column_names:
        raise ValueError(
            f"dataset {name} has no column {COLUMN!r}; its columns are {', '.join(rows.column_names)}"
        )
    return HubCorpus(name, rows.select_columns([COLUMN]), rows.dataset_size or 0)

"""A corpus as token ids in a memory-mapped file: written once, in parallel, checksummed, and reused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from saobp.data.corpora import Corpus, open_corpus
from saobp.data.parallel_encoding import encode_in_parallel, processes_for
from saobp.data.tokenizers import separator_of, tokenizer_checksum, tokenizer_text
from saobp.storage.atomic import NO_ROOM, first_line, reason, replacing
from saobp.storage.json_files import read_object, write_json
from saobp.storage.locks import exclusive
from saobp.storage.manifest import file_checksum

TOKENS, DOCUMENTS, METADATA = "tokens.bin", "documents.npy", "store.json"
FORMAT = 1

Progress = Callable[[int, int], object]
"""Progress callback: bytes of text done, approximate total."""


@dataclass(frozen=True)
class StoreMetadata:
    """Contents of ``store.json``, which is written last: a store that has one is complete."""

    format: int
    dtype: str
    tokens: int
    documents: int
    vocabulary: int
    separator: int
    tokenizer_checksum: str
    corpus: str
    corpus_checksum: str
    tokens_checksum: str
    documents_checksum: str


@dataclass(frozen=True)
class TokenStore:
    """The tokens of a corpus; every document ends with the separator."""

    folder: Path
    metadata: StoreMetadata

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> TokenStore:
        """Open a finished store; ``verify`` also reads all of it to compare checksums."""
        store = cls(Path(folder), _read_metadata(Path(folder)))
        store._check_sizes()
        if verify:
            store.verify()
        return store

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """Every token of the corpus, ``[tokens]``, mapped from the file."""
        return np.memmap(self.folder / TOKENS, dtype=self.metadata.dtype, mode="r")

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """Offsets of the documents, ``[documents + 1]``; the last one is the end."""
        return np.load(self.folder / DOCUMENTS, allow_pickle=False)

    @property
    def checksum(self) -> str:
        """SHA-256 of the tokens."""
        return self.metadata.tokens_checksum

    @property
    def vocabulary(self) -> int:
        return self.metadata.vocabulary

    @property
    def separator(self) -> int:
        return self.metadata.separator

    def verify(self) -> None:
        """Compare the files with the recorded checksums."""
        for name, expected in (
            (TOKENS, self.metadata.tokens_checksum),
            (DOCUMENTS, self.metadata.documents_checksum),
        ):
            checksum = file_checksum(self.folder / name)
            if checksum != expected:
                raise ValueError(
                    f"{self.folder / name} has changed since it was written: its SHA-256 is "
                    f"{checksum[:12]}..., {METADATA} says {expected[:12]}...; delete {self.folder} and "
                    "prepare it again"
                )

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Refuse a tokenizer other than the one that made the store."""
        if tokenizer_checksum(tokenizer) == self.metadata.tokenizer_checksum:
            return
        if len(tokenizer) != self.vocabulary:
            raise ValueError(
                f"the tokens in {self.folder} come from a vocabulary of {self.vocabulary}, "
                f"not from this tokenizer's {len(tokenizer)}: prepare the corpus again"
            )
        raise ValueError(
            f"the tokens in {self.folder} come from another tokenizer with as many tokens: "
            "prepare the corpus again"
        )

    def _check_sizes(self) -> None:
        expected = self.metadata
        for name in (TOKENS, DOCUMENTS):
            if not (self.folder / name).is_file():
                raise ValueError(f"{self.folder} has no {name}; delete {self.folder} and prepare it again")
        size, due = (self.folder / TOKENS).stat().st_size, expected.tokens * np.dtype(expected.dtype).itemsize
        if size != due:
            raise ValueError(
                f"{self.folder / TOKENS} is {'truncated' if size < due else 'too long'}: "
                f"{size} bytes where {METADATA} says {due}; delete {self.folder} and prepare it again"
            )
        try:
            starts = self.documents
        except Exception as problem:  # numpy evaluates the header as Python, which can raise anything
            raise ValueError(
                f"{self.folder / DOCUMENTS} cannot be read ({first_line(problem)}); delete {self.folder} and "
                "prepare it again"
            ) from None
        fits = starts.dtype == np.int64 and starts.shape == (expected.documents + 1,)
        if not fits or starts[0] != 0 or starts[-1] != expected.tokens or np.any(np.diff(starts) < 1):
            raise ValueError(
                f"{self.folder / DOCUMENTS} does not hold {expected.documents} rising starts that end at "
                f"{expected.tokens}; delete {self.folder} and prepare it again"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the path only: a DataLoader worker maps the file itself."""
        return {"folder": self.folder, "metadata": self.metadata}


def prepare_tokens(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    folder: str | Path,
    *,
    processes: int | None = None,
    progress: Progress | None = None,
) -> TokenStore:
    """Tokenise a corpus into ``folder``, or open the existing store if corpus and tokenizer match.

    ``processes``: workers (default: by cores and size). A second process
    that wants the same store waits for the first.
    """
    folder = Path(folder)
    report = progress or (lambda *_: None)
    with exclusive(folder):
        ready = _matching(folder, corpus, tokenizer)
        if ready is None:
            try:
                with replacing(folder) as new:
                    _write(new, corpus, tokenizer, processes_for(corpus.size, processes), report)
            except OSError as problem:
                if problem.errno not in NO_ROOM:
                    raise
                raise OSError(
                    f"the tokens of {corpus.name} could not be written to {folder}, because {reason(problem)}"
                ) from None
            ready = TokenStore.open(folder, verify=False)
        report(max(corpus.size, 1), max(corpus.size, 1))
        return ready


def prepare_corpora(
    names: Mapping[str, float | None] | list[str],
    tokenizer: PreTrainedTokenizerFast,
    folder: str | Path,
    *,
    data_dir: str | Path | None = None,
    processes: int | None = None,
    progress: Callable[[str], Progress] | None = None,
) -> dict[str, TokenStore]:
    """A store for each corpus of a mixture, in a subfolder named after corpus and tokenizer.

    ``progress`` maps a description to a progress callback.
    """
    corpora = {name: open_corpus(name, data_dir) for name in names}
    mark = tokenizer_checksum(tokenizer)[:8]
    return {
        name: prepare_tokens(
            corpus,
            tokenizer,
            Path(folder, f"{folder_name(name)}-{mark}"),
            processes=processes,
            progress=None if progress is None else progress(f"tokenising {Path(name).name}"),
        )
        for name, corpus in corpora.items()
    }


def folder_name(corpus: str) -> str:
    """A corpus's name as a folder name; a path gets a short hash against collisions."""
    last = Path(corpus).name
    if last == corpus:
        return corpus
    return f"{last}-{hashlib.sha256(corpus.encode()).hexdigest()[:6]}"


def _matching(folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> TokenStore | None:
    """The store in the folder, if it is complete and matches corpus and tokenizer."""
    if not (folder / METADATA).exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds other files and no {METADATA}: name an empty or a new folder")
        return None
    try:
        expected = _read_metadata(folder)
        if (expected.corpus_checksum, expected.tokenizer_checksum) != (
            corpus.checksum,
            tokenizer_checksum(tokenizer),
        ):
            return None
        return TokenStore.open(folder)
    except ValueError:
        return None


def _write(
    folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, processes: int, report: Progress
) -> None:
    vocabulary = len(tokenizer)
    dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    separator = separator_of(tokenizer)
    total, done = max(corpus.size, 1), 0
    whole = hashlib.sha256()
    ends: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
    with (folder / TOKENS).open("wb") as out:
        for group in encode_in_parallel(corpus.documents(), tokenizer_text(tokenizer), processes):
            stops = np.cumsum(group.counts)
            separated = np.insert(group.tokens, stops, separator).astype(dtype)
            out.write(separated.data)
            whole.update(separated.data)
            ends.append(ends[-1][-1] + stops + np.arange(1, len(stops) + 1))
            done += group.size
            report(min(done, total), total)
    starts = np.concatenate(ends)
    np.save(folder / DOCUMENTS, starts)
    metadata = StoreMetadata(
        format=FORMAT,
        dtype=dtype.str,
        tokens=int(starts[-1]),
        documents=len(starts) - 1,
        vocabulary=vocabulary,
        separator=separator,
        tokenizer_checksum=tokenizer_checksum(tokenizer),
        corpus=corpus.name,
        corpus_checksum=corpus.checksum,
        tokens_checksum=whole.hexdigest(),
        documents_checksum=file_checksum(folder / DOCUMENTS),
    )
    write_json(folder / METADATA, asdict(metadata))


def _read_metadata(folder: Path) -> StoreMetadata:
    file = folder / METADATA
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is no token store: it has no {METADATA}")
    try:
        values = read_object(file)
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']}, this saobp reads {FORMAT}")
        for field in fields(StoreMetadata):
            if type(values[field.name]).__name__ != field.type:
                raise ValueError(f"its {field.name} is {values[field.name]!r}, not of type {field.type}")
        np.dtype(values["dtype"])
        return StoreMetadata(**{field.name: values[field.name] for field in fields(StoreMetadata)})
    except KeyError as problem:
        raise ValueError(f"{file} does not describe a token store: it has no {problem}") from None
    except (ValueError, TypeError) as problem:
        raise ValueError(f"{file} does not describe a token store: {problem}") from None

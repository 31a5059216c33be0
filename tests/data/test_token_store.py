"""Token stores: right tokens, reuse, checks, and preparation that is killed or done twice at once."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from saobp.data import (
    TokenStore,
    open_corpus,
    parallel_encoding,
    prepare_corpora,
    prepare_tokens,
    train_vocabulary,
)
from saobp.data.corpora import FileCorpus
from saobp.data.tokenizer_store import trained_tokenizer
from saobp.testing.tiny_training import forked

PARAGRAPHS = [
    f"Story {n}: the fox number {n} sees {n * 7} lazy dogs, and runs. " * (1 + n % 5) for n in range(60)
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_vocabulary(PARAGRAPHS, 120)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for place, text in enumerate(PARAGRAPHS):
        (folder / f"{place:03}.txt").write_text(text)
    return folder


def expected(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    stripped = [text.strip("\n") for text in PARAGRAPHS]
    return [[*tokenizer(text, add_special_tokens=False)["input_ids"], 3] for text in stripped]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_store_holds_every_document_and_its_separator(
    texts: Path,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    processes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_encoding, "CHARACTERS_AT_ONCE", 700)
    told: list[tuple[int, int]] = []
    corpus = open_corpus(texts)
    store = prepare_tokens(
        corpus, tokenizer, tmp_path / "store", processes=processes, progress=lambda *now: told.append(now)
    )
    documents = expected(tokenizer)
    assert store.tokens.tolist() == [token for document in documents for token in document]
    assert np.diff(store.documents).tolist() == [len(document) for document in documents]
    assert (store.separator, store.vocabulary, store.tokens.dtype) == (3, len(tokenizer), np.dtype("<u2"))
    assert told == sorted(told)
    assert told[-1] == (corpus.size, corpus.size)
    assert len(told) > 5
    opened = TokenStore.open(tmp_path / "store")
    assert opened.checksum == store.checksum
    again = pickle.loads(pickle.dumps(opened))
    assert np.array_equal(again.tokens, store.tokens)
    assert len(pickle.dumps(opened)) < 2000


def test_a_large_vocabulary_takes_four_bytes(texts: Path, tmp_path: Path) -> None:
    tokenizer = train_vocabulary(PARAGRAPHS, 120)
    tokenizer.add_tokens([f"<extra{n}>" for n in range(2**16)])
    store = prepare_tokens(open_corpus(texts), tokenizer, tmp_path / "store")
    assert store.tokens.dtype == np.dtype("<u4")
    assert store.tokens.tolist() == [token for document in expected(tokenizer) for token in document]


def test_a_store_is_reused_until_text_or_tokenizer_change(
    texts: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    def written() -> int:
        prepare_tokens(open_corpus(texts), tokenizer, tmp_path / "store")
        return (tmp_path / "store" / "tokens.bin").stat().st_mtime_ns

    first = written()
    assert written() == first
    (texts / "000.txt").write_text("Another beginning.")
    second = written()
    assert second != first
    tokenizer = train_vocabulary(PARAGRAPHS[:9], 90)
    assert written() != second
    TokenStore.open(tmp_path / "store").check_tokenizer(tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store.lock", "store", "texts"]


def test_damage_is_named_and_repaired(
    texts: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = tmp_path / "store"
    store = prepare_tokens(open_corpus(texts), tokenizer, folder)
    whole = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"tokens.bin is truncated: \d+ bytes where store.json says \d+"):
        TokenStore.open(folder)
    (folder / "tokens.bin").write_bytes(whole[:-2] + b"\x01\x00")
    with pytest.raises(ValueError, match=r"tokens.bin has changed since it was written"):
        TokenStore.open(folder)
    assert len(TokenStore.open(folder, verify=False).tokens) == len(store.tokens)
    repaired = prepare_tokens(open_corpus(texts), tokenizer, folder)
    assert repaired.checksum == store.checksum
    assert repaired.tokens[-1] == 3
    np.save(folder / "documents.npy", np.array([0, 5, 2]))
    with pytest.raises(ValueError, match=r"documents.npy does not hold 60 rising starts"):
        TokenStore.open(folder)
    (folder / "documents.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i8', " + bytes(64))
    with pytest.raises(ValueError, match=r"documents.npy cannot be read"):
        TokenStore.open(folder)
    (folder / "documents.npy").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=r"documents.npy cannot be read"):
        TokenStore.open(folder)
    (folder / "documents.npy").unlink()
    with pytest.raises(ValueError, match=r"has no documents.npy"):
        TokenStore.open(folder)
    said = json.loads((folder / "store.json").read_text())
    for text, problem in {
        "{": "does not describe a token store",
        json.dumps(said | {"format": 9}): "its format is 9",
        json.dumps({"format": 1}): "has no 'dtype'",
    }.items():
        (folder / "store.json").write_text(text)
        with pytest.raises(ValueError, match=problem):
            TokenStore.open(folder)
    (folder / "store.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no token store: it has no store.json"):
        TokenStore.open(folder)
    with pytest.raises(ValueError, match=r"holds other files and no store.json"):
        prepare_tokens(open_corpus(texts), tokenizer, folder)


def test_another_tokenizer_is_refused(
    texts: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    store = prepare_tokens(open_corpus(texts), tokenizer, tmp_path / "store")
    smaller = train_vocabulary(PARAGRAPHS, 100)
    with pytest.raises(ValueError, match=f"vocabulary of {len(tokenizer)}, not from this tokenizer's 100"):
        store.check_tokenizer(smaller)
    other = train_vocabulary([text.replace("fox", "cow") for text in PARAGRAPHS], len(tokenizer))
    assert len(other) == len(tokenizer)
    with pytest.raises(ValueError, match="another tokenizer with as many tokens"):
        store.check_tokenizer(other)


def test_a_wrong_file_leaves_nothing_behind(
    texts: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (texts / "zzz.txt").write_bytes(b"bad \xff")
    with pytest.raises(ValueError, match=r"zzz.txt is not UTF-8: line 1, column 5"):
        prepare_tokens(open_corpus(texts), tokenizer, tmp_path / "store", processes=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store.lock", "texts"]


def test_a_mixture_has_a_store_each(texts: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    stores = prepare_corpora(
        ["texts", str(texts / "001.txt")], tokenizer, tmp_path / "stores", data_dir=tmp_path
    )
    assert [store.metadata.documents for store in stores.values()] == [60, 1]
    assert len({store.folder for store in stores.values()}) == 2


class Slow(FileCorpus):
    """A corpus that takes its time, so that something can happen meanwhile."""

    pause = 0.0

    def documents(self) -> Iterator[str]:
        for document in super().documents():
            time.sleep(self.pause)
            yield document


def test_killed_and_concurrent_preparation(
    texts: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    store = tmp_path / "store"

    def start(pause: float) -> BaseProcess:
        corpus = Slow("slow", open_corpus(texts).files)
        object.__setattr__(corpus, "pause", pause)
        return forked(lambda: prepare_tokens(corpus, tokenizer, store, processes=2))

    killed = start(60)
    limit = time.monotonic() + 60
    while not list(tmp_path.glob(".unfinished-store/tokens.bin")):
        assert time.monotonic() < limit
        assert killed.is_alive()
        time.sleep(0.02)
    killed.kill()
    killed.join(60)
    with pytest.raises(FileNotFoundError):
        TokenStore.open(store)

    both = [start(0.005), start(0.005)]
    for process in both:
        process.join(100)
    assert [process.exitcode for process in both] == [0, 0]
    documents = expected(tokenizer)
    assert TokenStore.open(store).tokens.tolist() == [token for document in documents for token in document]
    assert not list(tmp_path.glob(".unfinished-*"))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00v\x00{'descr': (((",
        b"\x93NUMPY\x01\x00\x06\x00'\\xff'\n",
        b"PK\x03\x04" + bytes(50),
    ],
)
def test_damaged_documents_are_named_in_one_sentence(tmp_path: Path, header: bytes) -> None:
    """Whatever numpy makes of the header."""
    (tmp_path / "text.txt").write_text("A fox sees a dog. " * 9)
    words = train_vocabulary(["A fox sees a dog."], 40)
    folder = prepare_tokens(open_corpus(tmp_path / "text.txt"), words, tmp_path / "store").folder
    (folder / "documents.npy").write_bytes(header)
    with pytest.raises(
        ValueError, match=r"documents\.npy cannot be read .*; delete .* and prepare it again"
    ) as raised:
        TokenStore.open(folder)
    assert "\n" not in str(raised.value)
    (folder / "documents.npy").unlink()
    with pytest.raises(ValueError, match=r"has no documents\.npy; delete .* and prepare it again"):
        TokenStore.open(folder)


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", 3.5), ("dtype", "<u9"), ("tokens", "many"), ("documents", None)]
)
def test_a_field_of_a_store_that_is_wrong_is_named(tmp_path: Path, field: str, value: object) -> None:
    (tmp_path / "text.txt").write_text("A fox sees a dog. " * 9)
    words = train_vocabulary(["A fox sees a dog."], 40)
    folder = prepare_tokens(open_corpus(tmp_path / "text.txt"), words, tmp_path / "store").folder
    metadata = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps({**metadata, field: value}))
    with pytest.raises(ValueError, match=r"store\.json does not describe a token store"):
        TokenStore.open(folder)


@pytest.mark.parametrize("content", [b"[]", b"3", b"{", b"\xff"])
def test_a_damaged_origin_of_a_vocabulary_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text.txt").write_text("A fox sees a dog. " * 9)
    trained_tokenizer(tmp_path, "bert", 40, [str(tmp_path / "text.txt")])
    (tmp_path / "tokenizer-bert-40" / "learned_from.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"learned_from\.json (holds no JSON object|is not JSON)"):
        trained_tokenizer(tmp_path, "bert", 40, [str(tmp_path / "text.txt")])

"""Tokenizers: BERT's and GPT-2's from files, trained ones, and the encoder that remembers words."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from saobp.data import (
    Documents,
    load_tokenizer,
    open_corpus,
    prefix_of,
    separator_of,
    train_vocabulary,
    word_encoder,
)
from saobp.data.tokenizers import SPECIAL, tokenizer_checksum, tokenizer_text

TEXTS = ["The quick brown fox jumps over the lazy dog.", "It's a fine day, isn't it? She can't know."] * 3


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return {kind: train_vocabulary(TEXTS, 300, kind) for kind in ("wordpiece", "bpe")}


def test_bert_and_gpt2_from_files(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizers"
    folder.mkdir()
    (folder / "bert-base-uncased-vocab.txt").write_text(
        "\n".join([*SPECIAL, "hello", "wor", "##ld", "!"]) + "\n"
    )
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (folder / "gpt2-vocab.json").write_text(json.dumps(letters | {"he": 256, "<|endoftext|>": 257}))
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\nh e\n")
    bert, gpt2 = load_tokenizer("bert", tmp_path), load_tokenizer("gpt2", tmp_path)
    encoded = bert("Hello WORLD!", "hello")
    assert bert.convert_ids_to_tokens(encoded["input_ids"]) == [
        "[CLS]", "hello", "wor", "##ld", "!", "[SEP]", "hello", "[SEP]",
    ]  # fmt: skip
    assert encoded["token_type_ids"] == [0] * 6 + [1] * 2
    assert (separator_of(bert), prefix_of(bert)) == (3, 2)
    assert gpt2("he!")["input_ids"] == [256, letters["!"]]
    assert gpt2.decode(gpt2("he é")["input_ids"]) == "he é"
    assert (separator_of(gpt2), prefix_of(gpt2)) == (257, None)
    (folder / "bert-base-uncased-vocab.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"not a BERT vocabulary: it has no line \[PAD\]"):
        load_tokenizer("bert", tmp_path)
    (folder / "gpt2-merges.txt").write_text("q zz\n")
    with pytest.raises(ValueError, match="not a BPE vocabulary"):
        load_tokenizer("gpt2", tmp_path)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_learning_tells_how_far_it_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saobp.data.tokenizers.CHARACTERS_PER_UPDATE", 50)
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(TEXTS[number % 2])
    told: list[tuple[int, int]] = []
    texts = Documents((open_corpus(tmp_path),))
    train_vocabulary(texts, 300, kind, progress=lambda done, total: told.append((done, total)))
    assert len(told) > 8
    assert told == sorted(told)
    assert len({total for _, total in told}) == 1
    assert 0.8 < told[-2][0] / told[-2][1] < 1 == told[-1][0] / told[-1][1]


def test_a_missing_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"no tokenizer 'bert': .* does not hold bert-base-uncased-vocab.txt.*--tokenizer train:8192",
    ):
        load_tokenizer("bert", tmp_path)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_trained_vocabulary_is_the_same_each_time_and_survives_saving(kind: str, tmp_path: Path) -> None:
    one, other = (train_vocabulary(iter(TEXTS), 280, kind) for _ in range(2))
    assert tokenizer_checksum(one) == tokenizer_checksum(other)
    assert len(one) <= 280
    one.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert tokenizer_checksum(again) == tokenizer_checksum(one)
    assert separator_of(again) == separator_of(one)
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXTS[0])["input_ids"] == one(TEXTS[0])["input_ids"]
    assert one.unk_token_id not in one(TEXTS[1])["input_ids"]


def test_ties_between_pairs_do_not_change_a_vocabulary() -> None:
    """Every word once, so nearly every choice of the trainer is between pairs that are equally frequent."""
    drawn = random.Random(0)
    texts = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(400)]
    assert len({tokenizer_checksum(train_vocabulary(texts, 200)) for _ in range(6)}) == 1


def test_documents_are_read_anew_and_give_the_vocabulary_of_their_texts(tmp_path: Path) -> None:
    for name, part in (("one", TEXTS[:2]), ("two", TEXTS[2:])):
        (tmp_path / name).mkdir()
        for number, text in enumerate(part):
            (tmp_path / name / f"{number}.txt").write_text(text)
    documents = Documents(tuple(open_corpus(str(tmp_path / name)) for name in ("one", "two")))
    assert list(documents) == list(documents)
    whole = train_vocabulary(iter(list(documents)), 280)
    assert tokenizer_checksum(train_vocabulary(documents, 280)) == tokenizer_checksum(whole)


def test_the_checksum_ignores_truncation() -> None:
    tokenizer = train_vocabulary(TEXTS, 300)
    before = tokenizer_checksum(tokenizer)
    tokenizer(TEXTS[0], truncation=True, max_length=4, padding="max_length")
    assert tokenizer_checksum(tokenizer) == before
    tokens, _ = word_encoder.CachedEncoder(tokenizer_text(tokenizer)).encode(TEXTS[:1])
    assert len(tokens) > 4


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no text to learn a vocabulary from"):
        train_vocabulary(["", " "], 300)
    with pytest.raises(ValueError, match="wordpiece, bpe, not 'unigram'"):
        train_vocabulary(TEXTS, 300, "unigram")
    with pytest.raises(ValueError, match="at least 257 tokens, not 100"):
        train_vocabulary(TEXTS, 100, "bpe")
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    with pytest.raises(ValueError, match="neither a separator nor an end-of-text token"):
        separator_of(bare)


PIECES = [*"ab A.,'1é中\n\t\r  -[]", "\u00a0", "\u2003", "\x1c", "\x85", "\u0301", "ß", "Σ", "\x00", "\u200b"]
PIECES += ["[SEP]", "[MASK]", "[PAD]", "<|endoftext|>", "  ", " the", "'s", " quick", "fox"]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_remembered_words_give_exactly_the_tokenizers_tokens(
    tokenizers: dict[str, PreTrainedTokenizerFast], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    remembering = word_encoder.CachedEncoder(tokenizer_text(tokenizer))
    assert remembering.kind == {"wordpiece": "bert", "bpe": "bytes"}[kind]

    @given(st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), max_size=4))
    def check(texts: list[str]) -> None:
        tokens, counts = remembering.encode(texts)
        plain = [tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        assert counts.tolist() == [len(ids) for ids in plain]
        assert tokens.tolist() == [token for ids in plain for token in ids]

    check()


def test_the_memory_starts_afresh_when_full(
    tokenizers: dict[str, PreTrainedTokenizerFast], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_encoder, "MAX_CACHED_WORDS", 5)
    remembering = word_encoder.CachedEncoder(tokenizer_text(tokenizers["wordpiece"]))
    first = [remembering.encode([text])[0].tolist() for text in TEXTS]
    assert len(remembering.words.numbers) < 30
    assert first[:2] == first[2:4]


def test_a_tokenizer_of_another_kind_gets_whole_texts(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    tokenizer = train_vocabulary(TEXTS, 300)
    tokenizer.add_tokens(["lazy dog"])
    remembering = word_encoder.CachedEncoder(tokenizer_text(tokenizer))
    assert remembering.kind == "whole"
    tokens, _ = remembering.encode([TEXTS[0]])
    assert tokens.tolist() == tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    facts = json.loads(tokenizer_text(tokenizers["bpe"]))
    for change in (
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": facts["pre_tokenizer"] | {"add_prefix_space": True}},
    ):
        assert word_encoder.kind_of(facts | change) == "whole"

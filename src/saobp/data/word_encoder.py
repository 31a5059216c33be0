"""Fast tokenisation with a cache of words. Also runs as a worker process.

As a program it imports nothing of saobp, so it starts in a fraction of a second: it reads pickled lists of
texts from stdin and writes pickled tokens to stdout until the input ends.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

MAX_CACHED_WORDS = 1_000_000
"""Words in the cache before it is cleared."""

PARTS_AT_ONCE = 512

Tokens = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""Concatenated token ids of several texts, and the number of tokens of each."""

_SEVERAL_BLANKS = re.compile(r"\s{2}")
_LONE_BLANK = re.compile(r"(?<=\S)(?=\s\S)")
_AROUND_MARKS = {
    "bert": re.compile(r"([.,'\"!?;:()/-])"),
    "bytes": re.compile(r"(?<=[A-Za-z])(?=[.,\"!?;:()/-])|(?<=[.,\"!?;:()/-])(?=[A-Za-z])"),
}
"""Where a word is cut into parts that have the same tokens alone: GPT-2 keeps runs of marks together."""


class CachedEncoder:
    """A tokenizer with a cache of the tokens of every word it has seen.

    BERT's and GPT-2's tokenizers treat words between blanks independently, and most words recur: only parts
    of unseen words go through the tokenizer, all others are looked up. The tokens are exactly those of the
    tokenizer; one of another kind gets the whole text.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        settings = json.loads(tokenizer_json)
        self.kind = kind_of(settings)
        self.between = _token_between(settings)
        self._clear()

    def _clear(self) -> None:
        self.parts = TokenCache(self._joined)
        self.words = TokenCache(self._by_parts)

    def encode(self, texts: Sequence[str]) -> Tokens:
        """The tokens of all texts."""
        if self.kind == "whole":
            return self._whole(texts)
        if len(self.words.numbers) > MAX_CACHED_WORDS:
            self._clear()
        split = _bert_words if self.kind == "bert" else _byte_words
        return _grouped(self.words.encode, map(split, texts), len(texts))

    def _by_parts(self, words: list[str]) -> Tokens:
        """Encode unseen words, split where the tokenizer splits them: parts recur more than words."""
        cut = _AROUND_MARKS[self.kind].split
        return _grouped(self.parts.encode, map(cut, words), len(words))

    def _joined(self, parts: list[str]) -> Tokens:
        """Encode unseen parts in batches."""
        groups = [parts[first : first + PARTS_AT_ONCE] for first in range(0, len(parts), PARTS_AT_ONCE)]
        tokens, counts = (np.concatenate(arrays) for arrays in zip(*map(self._as_one, groups), strict=True))
        return tokens, counts

    def _as_one(self, parts: list[str]) -> Tokens:
        """Encode parts as one text joined by a special token: faster than one by one."""
        if self.between is None:
            return self._whole(parts)
        special, text = self.between
        tokens, _ = self._whole([text.join(parts)])
        marks = np.flatnonzero(tokens == special)
        if len(marks) != len(parts) - 1:
            return self._whole(parts)
        return np.delete(tokens, marks), np.diff(marks, prepend=-1, append=len(tokens)) - 1

    def _whole(self, texts: Sequence[str]) -> Tokens:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        counts = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        flat = (token for encoding in ids for token in encoding)
        return np.fromiter(flat, dtype=np.uint32, count=int(counts.sum())), counts


class TokenCache:
    """The tokens of words: each is encoded once by ``encode_new`` and then looked up."""

    def __init__(self, encode_new: Callable[[list[str]], Tokens]) -> None:
        self.encode_new = encode_new
        self.numbers = WordIndex()
        self.tokens = np.empty(2**16, dtype=np.uint32)
        self.starts = np.empty(2**14, dtype=np.int64)
        self.counts = np.empty(2**14, dtype=np.int64)
        self.used = 0

    def encode(self, words: list[str]) -> Tokens:
        numbers = np.fromiter(map(self.numbers.__getitem__, words), dtype=np.int64, count=len(words))
        if self.numbers.new:
            self._add_new()
        counts = self.counts[numbers]
        ends = np.cumsum(counts)
        positions = np.repeat(self.starts[numbers] - ends + counts, counts)
        positions += np.arange(len(positions))
        return self.tokens[positions], counts

    def _add_new(self) -> None:
        new, self.numbers.new = self.numbers.new, []
        tokens, counts = self.encode_new(new)
        last = len(self.numbers)
        self.starts = _with_room(self.starts, last)
        self.counts = _with_room(self.counts, last)
        self.tokens = _with_room(self.tokens, self.used + len(tokens))
        self.counts[last - len(new) : last] = counts
        self.starts[last - len(new) : last] = self.used + np.cumsum(counts) - counts
        self.tokens[self.used : self.used + len(tokens)] = tokens
        self.used += len(tokens)


class WordIndex(dict[str, int]):
    """An index for each word in the order of first appearance; ``new`` lists those not yet cached."""

    def __init__(self) -> None:
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number


def kind_of(settings: dict) -> str:
    """``bert`` or ``bytes`` for tokenizers known to treat words independently, else ``whole``."""
    model, before = settings["model"], settings.get("pre_tokenizer") or {}
    normalizer = settings.get("normalizer")
    added = settings.get("added_tokens") or []
    if any(re.search(r"[\s.,'\"!?;:()/-]", token["content"]) for token in added):
        return "whole"
    if (
        model.get("type") == "WordPiece"
        and before.get("type") == "BertPreTokenizer"
        and (normalizer is None or (normalizer["type"] == "BertNormalizer" and normalizer.get("clean_text")))
    ):
        return "bert"
    if (
        model.get("type") == "BPE"
        and normalizer is None
        and not model.get("dropout")
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before.get("add_prefix_space")
        and not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    ):
        return "bytes"
    return "whole"


def _token_between(settings: dict) -> tuple[int, str] | None:
    """Id and text of a special token that separates words and occurs in no ordinary text."""
    for token in settings.get("added_tokens") or []:
        plain = not any(token[name] for name in ("lstrip", "rstrip", "single_word", "normalized"))
        if token["special"] and plain and token["content"] != settings["model"].get("unk_token"):
            return token["id"], token["content"]
    return None


def _bert_words(text: str) -> list[str]:
    """Split at blanks, which BERT drops; an empty word has no tokens."""
    return text.replace("\n", " ").replace("\t", " ").replace("\r", " ").split(" ")


def _byte_words(text: str) -> list[str]:
    """Split before every blank that stands alone; GPT-2 keeps it at the head of the word."""
    if _SEVERAL_BLANKS.search(text) or text[-1:].isspace() or text[:1].isspace():
        return _LONE_BLANK.split(text)
    words = text.replace("\n", " \n").split(" ")
    return [words[0], *(word if word[:1] == "\n" else " " + word for word in words[1:])]


def _grouped(encode: Callable[[list[str]], Tokens], groups: Iterable[list[str]], number: int) -> Tokens:
    """The tokens of groups of words, counted by group."""
    words: list[str] = []
    bounds = np.zeros(number + 1, dtype=np.int64)
    for index, group in enumerate(groups, 1):
        words += group
        bounds[index] = len(words)
    tokens, counts = encode(words)
    ends = np.concatenate([[0], np.cumsum(counts)])
    return tokens, np.diff(ends[bounds])


def _with_room(array: NDArray, least: int) -> NDArray:
    """The array, grown to at least twice its length if it is too short."""
    if least <= len(array):
        return array
    longer = np.empty(max(least, 2 * len(array)), dtype=array.dtype)
    longer[: len(array)] = array
    return longer


def main() -> None:
    """Encode lists of texts from stdin until it ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    encoder = CachedEncoder(pickle.load(requests))
    while True:
        try:
            texts = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: object = encoder.encode(texts)
        except Exception as problem:
            answer = f"{type(problem).__name__}: {problem}"
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()

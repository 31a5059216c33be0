"""Text to token numbers, many words at a time. Also runs as a process of its own.

As a program it imports nothing of saobp, so it starts in a fraction of a second: it reads pickled pieces of
work from its input and writes pickled answers to its output until the input ends.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

MOST_WORDS = 500_000
"""Words remembered before the memory starts afresh."""

_SEVERAL_BLANKS = re.compile(r"\s{2}")


class WordNumbers(dict[str, int]):
    """Numbers words as they first appear, and lists those that are new since last asked."""

    def __init__(self) -> None:
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number


class Encoder:
    """A tokenizer that remembers the tokens of every word it has seen.

    BERT's and GPT-2's tokenizers never look across a blank between words, and most words of a text are
    old ones: only new words go through the tokenizer, the others are looked up. The tokens are exactly
    those of the tokenizer; one of another kind gets the whole text.
    """

    def __init__(self, description: str) -> None:
        self.tokenizer = Tokenizer.from_str(description)
        self.kind = kind_of(json.loads(description))
        self._forget()

    def _forget(self) -> None:
        self.words = WordNumbers()
        self.tokens = np.empty(2**16, dtype=np.uint32)
        self.starts = np.empty(2**14, dtype=np.int64)
        self.counts = np.empty(2**14, dtype=np.int64)
        self.used = 0

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The tokens of all texts, one after the other, and how many each text has."""
        if self.kind == "whole":
            return self._whole(texts)
        if len(self.words) > MOST_WORDS:
            self._forget()
        split = _bert_words if self.kind == "bert" else _byte_words
        words: list[str] = []
        bounds = np.zeros(len(texts) + 1, dtype=np.int64)
        for place, text in enumerate(texts, 1):
            words += split(text)
            bounds[place] = len(words)
        numbers = np.fromiter(map(self.words.__getitem__, words), dtype=np.int64, count=len(words))
        self._learn()
        counts = self.counts[numbers]
        ends = np.zeros(len(words) + 1, dtype=np.int64)
        np.cumsum(counts, out=ends[1:])
        places = np.repeat(self.starts[numbers] - ends[:-1], counts)
        places += np.arange(ends[-1])
        return self.tokens[places], np.diff(ends[bounds])

    def _learn(self) -> None:
        """Tokenise the words that are new."""
        new, self.words.new = self.words.new, []
        if not new:
            return
        tokens, counts = self._whole(new)
        first = len(self.words) - len(new)
        self.starts = _with_room(self.starts, len(self.words))
        self.counts = _with_room(self.counts, len(self.words))
        self.tokens = _with_room(self.tokens, self.used + len(tokens))
        self.counts[first : len(self.words)] = counts
        self.starts[first : len(self.words)] = self.used + np.cumsum(counts) - counts
        self.tokens[self.used : self.used + len(tokens)] = tokens
        self.used += len(tokens)

    def _whole(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [one.ids for one in found]
        counts = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        flat = (token for one in ids for token in one)
        return np.fromiter(flat, dtype=np.uint32, count=int(counts.sum())), counts


def kind_of(description: dict) -> str:
    """``bert`` or ``bytes`` for tokenizers known to look at words between blanks alone, else ``whole``."""
    model, before = description["model"], description.get("pre_tokenizer") or {}
    normalizer = description.get("normalizer")
    added = description.get("added_tokens") or []
    if any(re.search(r"\s", token["content"]) for token in added):
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


def _bert_words(text: str) -> list[str]:
    """Split at blanks, which BERT drops; an empty piece has no tokens."""
    return text.replace("\n", " ").replace("\t", " ").replace("\r", " ").split(" ")


def _byte_words(text: str) -> list[str]:
    """Split before every blank that stands alone; GPT-2 keeps it at the head of the word."""
    if _SEVERAL_BLANKS.search(text) or text[-1:].isspace() or text[:1].isspace():
        return re.split(r"(?<=\S)(?=\s\S)", text)
    words = text.split(" ")
    return [words[0], *(" " + word for word in words[1:])]


def _with_room(array: NDArray, least: int) -> NDArray:
    """The array, at least twice as long where it was too short."""
    if least <= len(array):
        return array
    longer = np.empty(max(least, 2 * len(array)), dtype=array.dtype)
    longer[: len(array)] = array
    return longer


def main() -> None:
    """Answer pieces of work, each a list of texts, until there are no more."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    encoder = Encoder(pickle.load(given))
    while True:
        try:
            texts = pickle.load(given)
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

"""Texts to padded batches: each distinct text is tokenised once, and sequences are assembled on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from saobp.data.tokenizers import tokenizer_text
from saobp.data.word_encoder import CachedEncoder

BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Lengths that batches are padded to: few, to limit the shapes of kernels and compiled steps."""
CHUNK = 4096


def bucket_length(longest: int, limit: int) -> int:
    """The length that a batch is padded to, given its longest sequence."""
    return min(next((size for size in BUCKETS if size >= longest), limit), max(limit, longest))


class TokenTable:
    """The distinct texts of a task as tokens, without special ones, in one flat array."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, characters: bool = False
    ) -> None:
        """``characters`` also stores each token's character offsets, ``[tokens, 2]``."""
        self._rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        distinct = list(self._rows)
        self.characters: np.ndarray | None = None
        if characters:
            self.tokens, self.lengths, self.characters = _with_characters(tokenizer, distinct)
        else:
            self.tokens, self.lengths = CachedEncoder(tokenizer_text(tokenizer)).encode(distinct)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])

    def rows(self, texts: Sequence[str]) -> np.ndarray:
        """Row of each text, ``[texts]``."""
        return np.fromiter((self._rows[text] for text in texts), dtype=np.int64, count=len(texts))


def _with_characters(
    tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, tokens per text, and character offsets of each token."""
    ids: list[np.ndarray] = []
    spans: list[np.ndarray] = []
    for begin in range(0, len(texts), CHUNK):
        encoded = tokenizer(
            texts[begin : begin + CHUNK],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids += [np.asarray(row, dtype=np.int64) for row in encoded["input_ids"]]
        spans += [np.asarray(row, dtype=np.int64).reshape(-1, 2) for row in encoded["offset_mapping"]]
    return np.concatenate(ids), np.array([len(row) for row in ids]), np.concatenate(spans)


@dataclass(frozen=True)
class Layout:
    """How a tokenizer joins one or two texts: the special tokens before, between and after."""

    before: np.ndarray
    between: np.ndarray
    after: np.ndarray
    padding: int
    has_types: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Layout:
        """Derived from an encoded pair; without a separator, the end-of-text token is used."""
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        single = tokenizer("b", add_special_tokens=False)["input_ids"]
        pair = tokenizer("a", "b")
        ids = list(pair["input_ids"])
        first = _find(ids, plain, 0)
        second = _find(ids, single, first + len(plain))
        between = ids[first + len(plain) : second]
        if not between and tokenizer.eos_token_id is not None:
            between = [tokenizer.eos_token_id]
        padding = tokenizer.pad_token_id
        if padding is None:
            padding = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
        return cls(
            before=np.array(ids[:first], dtype=np.int32),
            between=np.array(between, dtype=np.int32),
            after=np.array(ids[second + len(single) :], dtype=np.int32),
            padding=int(padding),
            has_types="token_type_ids" in pair,
        )

    def specials(self, paired: bool) -> int:
        return len(self.before) + len(self.after) + (len(self.between) if paired else 0)


def _find(ids: list[int], part: list[int], start: int) -> int:
    for at in range(start, len(ids) - len(part) + 1):
        if ids[at : at + len(part)] == part:
            return at
    raise ValueError("the tokenizer changes texts when it joins them, so pairs cannot be laid out")


@dataclass(frozen=True)
class Sequences:
    """Sequences as references into a table: nothing is copied until a batch is asked for.

    first, second: rows of the table, ``[sequences]``; second is None for single texts.
    The second text is cut to ``second_lengths`` tokens from ``second_starts``, the first to its beginning.
    """

    table: TokenTable
    layout: Layout
    first: np.ndarray
    first_lengths: np.ndarray
    second: np.ndarray | None
    second_starts: np.ndarray
    second_lengths: np.ndarray

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.first_lengths + self.second_lengths + self.layout.specials(self.second is not None)

    @cached_property
    def second_offset(self) -> np.ndarray:
        """Position of the second text's first token in each sequence."""
        return self.first_lengths + len(self.layout.before) + len(self.layout.between)

    def gather(self, indices: np.ndarray, length: int) -> dict[str, Tensor]:
        """Padded ids, mask and, where the tokenizer has them, token types, each ``[indices, length]``."""
        ids = np.full((len(indices), length), self.layout.padding, dtype=np.int64)
        types = np.zeros_like(ids)
        sizes = self.lengths[indices]
        before, between, after = self.layout.before, self.layout.between, self.layout.after
        tokens, starts = self.table.tokens, self.table.starts
        for row, index in enumerate(indices):
            at = len(before)
            ids[row, :at] = before
            size = self.first_lengths[index]
            begin = starts[self.first[index]]
            ids[row, at : at + size] = tokens[begin : begin + size]
            at += size
            if self.second is not None:
                ids[row, at : at + len(between)] = between
                at += len(between)
                size = self.second_lengths[index]
                begin = starts[self.second[index]] + self.second_starts[index]
                ids[row, at : at + size] = tokens[begin : begin + size]
                types[row, at : sizes[row]] = 1
                at += size
            ids[row, at : at + len(after)] = after
        mask = np.arange(length) < sizes[:, None]
        batch = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        }
        if self.layout.has_types:
            batch["token_type_ids"] = torch.from_numpy(types)
        return batch


def pair_lengths(first: np.ndarray, second: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of pairs cut to ``budget`` tokens together: the longer text is truncated first."""
    half = budget // 2
    kept_first = np.where(
        second <= half, np.minimum(first, budget - second), np.minimum(first, budget - half)
    )
    kept_second = np.minimum(second, budget - kept_first)
    return kept_first, kept_second

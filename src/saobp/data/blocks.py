"""Packed blocks of tokens, mixed from several corpora and shuffled by seed, gathered a batch at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from saobp.data.token_store import TokenStore

HELD_OUT = 0.01
SPLITS = ("train", "validation")

_HOLDING_OUT, _SHUFFLING, _MIXING = 0x5A0B, 0x5A0C, 0x5A0D


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks ``[length]`` of documents one after the other, without padding; a map-style dataset.

    stores:    corpora by name, all made by one tokenizer
    weights:   share of each corpus in an epoch; None, or None for every corpus: all of each, once
    prefix:    token that every block starts with, such as [CLS]; it counts in ``length``
    held_out:  share of each corpus kept for ``split="validation"``: whole documents, the same for every seed;
               1 makes all of it validation

    An epoch has as many blocks as the corpora have together. A corpus with a larger share than its size is
    repeated, one with a smaller share is read on in the next epoch, so none is seen twice before all of it is
    seen once. The order depends on (seed, epoch) alone. Validation has a fixed order and ignores weights.
    """

    def __init__(
        self,
        stores: Mapping[str, TokenStore],
        weights: Mapping[str, float | None] | None = None,
        *,
        length: int,
        seed: int = 0,
        split: str = "train",
        held_out: float = HELD_OUT,
        prefix: int | None = None,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"a split of blocks is {' or '.join(SPLITS)}, not {split!r}")
        if not 0 <= held_out <= 1:
            raise ValueError(f"held_out is a share from 0 to 1, not {held_out}")
        text_length = length - (prefix is not None)
        if text_length < 1:
            raise ValueError(f"a block of length {length} has no room for text")
        _check_together(stores)
        self.stores = dict(stores)
        self.length, self.seed, self.split, self.prefix = length, seed, split, prefix
        self.held_out = held_out
        self.epoch = 0
        self._text_length = text_length
        self._streams = [
            _Stream(store, *_kept_documents(store, split, held_out)) for store in self.stores.values()
        ]
        self._whole = np.array([stream.tokens // text_length for stream in self._streams])
        for name, stream, blocks in zip(self.stores, self._streams, self._whole, strict=True):
            if blocks == 0 and (split == "train" or self._whole.sum() == 0):
                raise ValueError(
                    f"corpus {name} has {stream.tokens} tokens for {split}, fewer than one block of "
                    f"{text_length}: give more text, a shorter length, or another held_out"
                )
        self._shares = self._whole if split == "validation" else self._per_epoch(weights)
        self._bounds = np.concatenate([[0], np.cumsum(self._whole)[:-1]])
        """Global index of each corpus's first block."""
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return int(self._shares.sum())

    @property
    def tokens(self) -> int:
        """Tokens that one epoch shows to the model, prefixes included."""
        return len(self) * self.length

    @property
    def composition(self) -> dict[str, int]:
        """Blocks that each corpus gives to an epoch."""
        return {name: int(share) for name, share in zip(self.stores, self._shares, strict=True)}

    def with_seed(self, seed: int) -> Blocks:
        """The same blocks in the order of another seed, without verifying the stores again."""
        blocks = copy.copy(self)
        blocks.seed, blocks._order = seed, None
        return blocks

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; Accelerate's loaders call this."""
        self.epoch = int(epoch)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One block, ``{"input_ids": [length]}``."""
        index = range(len(self))[index]
        return {"input_ids": self.__getitems__([index])["input_ids"][0]}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A batch at once, ``{"input_ids": [batch, length]}``: use :func:`identity_collate` to collate."""
        return self.at(self.epoch * len(self) + np.asarray(indices, dtype=np.int64))

    def at(self, numbers: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """Blocks by their global index in training: index // len is the epoch.

        A resumed run only needs the number of blocks it has seen.
        """
        numbers = np.asarray(numbers, dtype=np.int64)
        if numbers.size and numbers.min() < 0:
            raise IndexError(f"blocks are numbered from 0, not from {numbers.min()}")
        epochs, positions = np.divmod(numbers, len(self))
        out = np.empty((len(numbers), self.length), dtype=np.int64)
        if self.prefix is not None:
            out[:, 0] = self.prefix
        text = out[:, self.length - self._text_length :]
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            drawn = self._ordered(int(epoch))[positions[rows]]
            which = np.searchsorted(self._bounds, drawn, side="right") - 1
            for index in np.unique(which):
                mine = which == index
                blocks = drawn[mine] - self._bounds[index]
                text[rows[mine]] = self._streams[index].gather(blocks * self._text_length, self._text_length)
        return {"input_ids": torch.from_numpy(out)}

    def _ordered(self, epoch: int) -> NDArray[np.int64]:
        """Global block indices of an epoch, in its order."""
        if self.split == "validation":
            epoch = 0
        if self._order is None or self._order[0] != epoch:
            drawn = [
                first + self._draw(index, epoch)
                for index, first in enumerate(self._bounds)
                if self._shares[index]
            ]
            seed = 0 if self.split == "validation" else self.seed
            order = np.random.default_rng([_MIXING, seed, epoch]).permutation(np.concatenate(drawn))
            self._order = (epoch, order)
        return self._order[1]

    def _draw(self, index: int, epoch: int) -> NDArray[np.int64]:
        """A corpus's blocks of one epoch: the next ones in its sequence of shuffled passes."""
        blocks, share = int(self._whole[index]), int(self._shares[index])
        if self.split == "validation":
            return np.arange(blocks)
        first, last = epoch * share, (epoch + 1) * share
        passes = [
            np.random.default_rng([_SHUFFLING, self.seed, index, number]).permutation(blocks)
            for number in range(first // blocks, (last - 1) // blocks + 1)
        ]
        start = first - first // blocks * blocks
        return np.concatenate(passes)[start : start + share]

    def _per_epoch(self, weights: Mapping[str, float | None] | None) -> NDArray[np.int64]:
        weighted = {name: weight for name, weight in (weights or {}).items() if weight is not None}
        if not weighted:
            return self._whole
        if set(weighted) != set(self.stores):
            raise ValueError(
                f"weights are for {', '.join(sorted(weighted))}, "
                f"the corpora are {', '.join(sorted(self.stores))}"
            )
        shares = np.array([weighted[name] for name in self.stores])
        if not np.all(np.isfinite(shares)) or np.any(shares <= 0):
            raise ValueError(f"every corpus needs a weight above 0, not {weighted}")
        counts = np.maximum(1, np.rint(shares / shares.sum() * self._whole.sum()))
        return counts.astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """Without the order of the epoch, which a worker recomputes."""
        return self.__dict__ | {"_order": None}


def identity_collate(batch: Any) -> Any:
    """Collate function for a dataset that returns batches, such as :class:`Blocks`."""
    return batch


def held_out_documents(store: TokenStore, held_out: float = HELD_OUT) -> NDArray[np.int64]:
    """Indices of the documents that :class:`Blocks` holds out for validation, sorted."""
    starts, _ = _kept_documents(store, "validation", held_out)
    return np.flatnonzero(np.isin(store.documents[:-1], starts))


class _Stream:
    """Spans of a store, read as one concatenated sequence."""

    def __init__(self, store: TokenStore, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self.store = store
        joins = starts[1:] != ends[:-1]
        starts = starts[np.concatenate([[True], joins])] if len(starts) else starts
        ends = ends[np.concatenate([joins, [True]])] if len(ends) else ends
        before = np.cumsum(ends - starts)
        self.tokens = int(before[-1]) if len(before) else 0
        self.firsts = before - (ends - starts)
        self.shifts = starts - self.firsts

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[Any]:
        """Tokens ``[rows, length]`` from offsets of the concatenated sequence.

        Rows within one span are sliced; the few that cross into another are gathered token by token.
        """
        span = np.searchsorted(self.firsts, starts, side="right") - 1
        last = np.searchsorted(self.firsts, starts + (length - 1), side="right") - 1
        begins = starts + self.shifts[span]
        crosses = span != last
        begins[crosses] = 0
        rows = np.lib.stride_tricks.sliding_window_view(self.store.tokens, length)[begins]
        if crosses.any():
            positions = starts[crosses, None] + np.arange(length)
            positions += self.shifts[np.searchsorted(self.firsts, positions, side="right") - 1]
            rows[crosses] = self.store.tokens[positions]
        return rows


def _kept_documents(
    store: TokenStore, split: str, held_out: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and ends of the documents of a split.

    Documents are held out in a fixed shuffled order until their tokens make the share. One that would
    overshoot it by far is skipped; where every one would, the end of the last document is held out.
    """
    starts, ends = store.documents[:-1], store.documents[1:]
    wanted = held_out * store.metadata.tokens
    chosen = np.zeros(len(starts), dtype=bool)
    held = 0
    for index in np.random.default_rng(_HOLDING_OUT).permutation(len(starts)):
        if held >= wanted:
            break
        if held + ends[index] - starts[index] <= max(2 * wanted, 1) or held_out == 1:
            chosen[index] = True
            held += int(ends[index] - starts[index])
    if held == 0 and wanted >= 1:
        cut = ends[-1] - min(int(wanted), int(ends[-1] - starts[-1]) // 2)
        if split == "validation":
            return np.array([cut]), ends[-1:]
        return starts, np.concatenate([ends[:-1], [cut]])
    chosen_documents = chosen if split == "validation" else ~chosen
    return starts[chosen_documents], ends[chosen_documents]


def _check_together(stores: Mapping[str, TokenStore]) -> None:
    if not stores:
        raise ValueError("there is no corpus to make blocks of")
    first, *others = stores
    for name in others:
        expected, metadata = stores[first].metadata, stores[name].metadata
        if expected.tokenizer_checksum != metadata.tokenizer_checksum:
            raise ValueError(
                f"corpora {first} and {name} were made by different tokenizers (vocabularies of "
                f"{expected.vocabulary} and {metadata.vocabulary}): prepare both with the same one"
            )

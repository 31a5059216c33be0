"""Blocks: every token once, held-out documents apart, order from the seed, batches as single blocks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from saobp.data import Blocks, TokenStore, identity_collate, open_corpus, prepare_tokens, train_vocabulary
from saobp.data.token_store import StoreMetadata


class Counting(TokenStore):
    """A store in memory in which every token is its own place, so that blocks show what they took."""

    @classmethod
    def of(cls, lengths: list[int], first: int = 0) -> Counting:
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        total = int(ends[-1])
        said = StoreMetadata(1, "<u4", total, len(lengths), 2**31, 3, "same", "counted", "c", "t", "d")
        store = cls(Path("nowhere"), said)
        store.__dict__["tokens"] = np.arange(first, first + total, dtype="<u4")
        store.__dict__["documents"] = ends
        return store


def all_of(blocks: Blocks, epoch: int = 0) -> np.ndarray:
    return blocks.at(epoch * len(blocks) + np.arange(len(blocks)))["input_ids"].numpy()


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.integers(0, 5),
)
def test_every_training_token_once_an_epoch_and_no_held_out_one(
    lengths: list[int], length: int, held_out: float, seed: int
) -> None:
    store = Counting.of(lengths)
    seen: dict[str, set[int]] = {}
    for split in ("train", "validation"):
        try:
            blocks = Blocks({"a": store}, length=length, held_out=held_out, seed=seed, split=split)
        except ValueError:
            continue
        tokens = all_of(blocks, epoch=seed).ravel().tolist()
        assert len(set(tokens)) == len(tokens)
        seen[split] = set(tokens)
    if len(seen) == 2:
        assert not seen["train"] & seen["validation"]
    if held_out == 0 and "train" in seen:
        assert len(seen["train"]) == sum(lengths) // length * length
        assert "validation" not in seen


def test_held_out_documents_are_whole_and_the_same_for_every_seed() -> None:
    store = Counting.of([7] * 400)
    held = [Blocks({"a": store}, length=7, seed=seed, split="validation", held_out=0.05) for seed in (1, 2)]
    assert torch.equal(held[0].at(range(20))["input_ids"], held[1].at(range(20))["input_ids"])
    assert len(held[0]) == 20
    assert set((all_of(held[0])[:, 0] % 7).tolist()) == {0}


def test_a_single_document_holds_out_its_end() -> None:
    store = Counting.of([1000])
    train = Blocks({"a": store}, length=10, held_out=0.1)
    validation = Blocks({"a": store}, length=10, held_out=0.1, split="validation")
    assert sorted(all_of(validation).ravel().tolist()) == list(range(900, 1000))
    assert sorted(all_of(train).ravel().tolist()) == list(range(900))
    everything = Blocks({"a": store}, length=10, held_out=1.0, split="validation")
    assert len(everything) == 100


def test_one_huge_document_is_not_held_out() -> None:
    store = Counting.of([5000] + [10] * 100)
    validation = Blocks({"a": store}, length=10, held_out=0.02, split="validation")
    assert 100 <= len(validation) * 10 <= 240
    assert all_of(validation).min() >= 5000


def test_order_comes_from_seed_and_epoch() -> None:
    store = Counting.of([50] * 40)

    def order(seed: int, epoch: int) -> list[int]:
        return all_of(Blocks({"a": store}, length=10, seed=seed), epoch)[:, 0].tolist()

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert sorted(order(1, 0)) == sorted(order(2, 5))
    blocks = Blocks({"a": store}, length=10, seed=1)
    blocks.set_epoch(1)
    assert [int(blocks[place]["input_ids"][0]) for place in range(len(blocks))] == order(1, 1)
    assert int(blocks[-1]["input_ids"][0]) == order(1, 1)[-1]
    assert all_of(blocks.with_seed(2), 1)[:, 0].tolist() == order(2, 1)
    assert all_of(blocks, 1)[:, 0].tolist() == order(1, 1)
    with pytest.raises(IndexError):
        blocks[len(blocks)]
    with pytest.raises(IndexError):
        blocks.at([-1])


def test_numbers_run_through_epochs_in_one_batch() -> None:
    blocks = Blocks({"a": Counting.of([50] * 40)}, length=10, seed=3)
    size = len(blocks)
    both = blocks.at([size - 1, size, 2 * size + 3])["input_ids"]
    assert torch.equal(both[0], torch.from_numpy(all_of(blocks, 0)[-1]))
    assert torch.equal(both[1], torch.from_numpy(all_of(blocks, 1)[0]))
    assert torch.equal(both[2], torch.from_numpy(all_of(blocks, 2)[3]))


def test_weights_set_the_shares_and_nothing_repeats_too_early() -> None:
    stores = {"large": Counting.of([100] * 80), "small": Counting.of([100] * 20, first=10**6)}
    blocks = Blocks(stores, {"large": 0.5, "small": 0.5}, length=10, held_out=0.0)
    assert blocks.composition == {"large": 500, "small": 500}
    first, second = (all_of(blocks, epoch)[:, 0].tolist() for epoch in (0, 1))
    large = Counter(start for start in first + second if start < 10**6)
    small = Counter(start for start in first if start >= 10**6)
    assert set(large.values()) == {1, 2}
    assert len(large) == 800
    assert set(small.values()) == {2, 3}
    assert len(small) == 200
    assert first[:100] != sorted(first[:100])
    natural = Blocks(stores, {"large": None, "small": None}, length=10, held_out=0.0)
    assert natural.composition == {"large": 800, "small": 200}
    assert natural.tokens == 10_000


def test_the_prefix_stands_first_and_counts() -> None:
    blocks = Blocks({"a": Counting.of([30] * 30)}, length=10, prefix=7, held_out=0.0)
    batch = blocks.at(range(5))["input_ids"]
    assert batch.shape == (5, 10)
    assert batch.dtype == torch.int64
    assert (batch[:, 0] == 7).all()
    assert torch.equal(batch[:, 1:].diff(dim=1), torch.ones(5, 8, dtype=torch.int64))
    assert len(blocks) == 100


def test_refusals() -> None:
    store = Counting.of([50] * 4)
    with pytest.raises(ValueError, match="train or validation, not 'test'"):
        Blocks({"a": store}, length=5, split="test")
    with pytest.raises(ValueError, match="share from 0 to 1, not 2"):
        Blocks({"a": store}, length=5, held_out=2)
    with pytest.raises(ValueError, match="no room for text"):
        Blocks({"a": store}, length=1, prefix=1)
    with pytest.raises(ValueError, match="corpus a has 0 tokens for validation"):
        Blocks({"a": store}, length=5, split="validation", held_out=0.0)
    with pytest.raises(ValueError, match="weights are for b, the corpora are a"):
        Blocks({"a": store}, {"b": 1.0}, length=5)
    with pytest.raises(ValueError, match="weight above 0"):
        Blocks({"a": store}, {"a": 0.0}, length=5)
    with pytest.raises(ValueError, match="no corpus"):
        Blocks({}, length=5)
    other = Counting.of([5])
    object.__setattr__(other, "metadata", StoreMetadata(1, "<u4", 5, 1, 9, 3, "other", "n", "c", "t", "d"))
    with pytest.raises(ValueError, match="corpora a and b were made by different tokenizers"):
        Blocks({"a": store, "b": other}, length=5)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenStore, PreTrainedTokenizerFast]:
    folder = tmp_path_factory.mktemp("texts")
    texts = [f"Story {n}: the fox number {n} sees {n * 7} lazy dogs. " * 3 for n in range(50)]
    for place, text in enumerate(texts):
        (folder / f"{place:02}.txt").write_text(text)
    tokenizer = train_vocabulary(texts, 100)
    return prepare_tokens(open_corpus(folder), tokenizer, folder / "store"), tokenizer


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_takes_batches_whole(real: tuple[TokenStore, PreTrainedTokenizerFast], workers: int) -> None:
    store, tokenizer = real
    blocks = Blocks({"a": store}, length=16, prefix=tokenizer.cls_token_id, seed=1)
    context = "fork" if workers else None
    loader = DataLoader(
        blocks,
        batch_size=4,
        collate_fn=identity_collate,
        num_workers=workers,
        multiprocessing_context=context,
    )
    batches = [batch["input_ids"] for batch in loader]
    assert torch.equal(torch.cat(batches), blocks.at(range(len(blocks)))["input_ids"])
    assert "the fox number" in tokenizer.decode(torch.cat(batches).flatten())

"""A task's rows as sequences with labels, ready to be drawn in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerFast

from saobp.data.tasks import Split, TaskSpec
from saobp.training.finetune.encoding import Layout, Sequences, TokenTable, bucket_length, pair_lengths

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Examples(Dataset[Batch]):
    """Examples of ``group`` sequences each (the candidates of a choice; else 1) with their labels.

    ``__getitems__`` returns one padded batch: ``[batch, length]``, or for a choice
    ``[batch, group, length]``.
    """

    sequences: Sequences
    labels: Mapping[str, np.ndarray]
    limit: int
    group: int = 1
    cut: float = 0.0

    def __len__(self) -> int:
        return len(self.sequences.first) // self.group

    @cached_property
    def lengths(self) -> np.ndarray:
        """Longest sequence of each example."""
        return self.sequences.lengths.reshape(-1, self.group).max(1)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = np.asarray(indices)
        length = bucket_length(int(self.lengths[chosen].max()), self.limit)
        flat = (chosen[:, None] * self.group + np.arange(self.group)).reshape(-1)
        batch = self.sequences.gather(flat, length)
        if self.group > 1:
            batch = {name: values.view(len(chosen), self.group, length) for name, values in batch.items()}
        for name, values in self.labels.items():
            batch[name] = torch.from_numpy(values[chosen])
        return batch

    def __getitem__(self, index: int) -> Batch:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}


@dataclass(frozen=True)
class LengthBatches:
    """Batches of similar length, in an order determined by (seed, epoch)."""

    lengths: np.ndarray
    batch: int
    seed: int
    pool: int = 50

    def epoch(self, epoch: int) -> list[list[int]]:
        """Shuffle, sort by length inside pools of ``pool`` batches, cut, and shuffle the batches."""
        draw = np.random.default_rng((self.seed, epoch))
        order = draw.permutation(len(self.lengths))
        batches: list[list[int]] = []
        for begin in range(0, len(order), self.pool * self.batch):
            pool = order[begin : begin + self.pool * self.batch]
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += [pool[at : at + self.batch].tolist() for at in range(0, len(pool), self.batch)]
        return [batches[index] for index in draw.permutation(len(batches))]

    def __len__(self) -> int:
        """Batches of an epoch; only the last pool can end with a smaller one."""
        return -(-len(self.lengths) // self.batch)


class EpochBatches(Sampler[list[int]]):
    """The batch sampler of a DataLoader; ``set_epoch`` chooses the order."""

    drop_last = False

    def __init__(self, batches: LengthBatches) -> None:
        self.batches, self.batch_size, self.current = batches, batches.batch, 0

    def set_epoch(self, epoch: int) -> None:
        self.current = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches.epoch(self.current))

    def __len__(self) -> int:
        return len(self.batches)


def encode_examples(
    split: Split, spec: TaskSpec, tokenizer: PreTrainedTokenizerFast, length: int
) -> Examples:
    """Tokenise a split of a classification, regression or choice task."""
    seconds: list[str] | None = None
    group = 1
    if spec.kind == "choice":
        firsts, seconds = choice_texts(split, spec)
        group = len(spec.labels)
    else:
        firsts = split.column(spec.texts[0])
        if len(spec.texts) > 1:
            seconds = split.column(spec.texts[1])
    table = TokenTable(tokenizer, [*firsts, *(seconds or [])])
    layout = Layout.of(tokenizer)
    budget = length - layout.specials(seconds is not None)
    first = table.rows(firsts)
    second = None if seconds is None else table.rows(seconds)
    whole = table.lengths[first], np.zeros_like(first) if second is None else table.lengths[second]
    truncated = pair_lengths(*whole, budget)
    sequences = Sequences(table, layout, first, truncated[0], second, np.zeros_like(first), truncated[1])
    labels = split.labels.astype(np.float32) if spec.kind == "regression" else split.labels
    cut = float((whole[0] + whole[1] > budget).mean())
    return Examples(sequences, {"labels": labels}, length, group, cut)


def choice_texts(split: Split, spec: TaskSpec) -> tuple[list[str], list[str]]:
    """Context and candidate of each sequence: a candidate fills the question's gap, or follows it."""
    contexts, options = split.column(spec.texts[0]), split.column(spec.options)
    questions = split.column(spec.texts[1]) if len(spec.texts) > 1 else [""] * len(contexts)
    firsts = [context for context, candidates in zip(contexts, options, strict=True) for _ in candidates]
    seconds = [
        option
        if not question
        else question.replace("_", option, 1)
        if "_" in question
        else f"{question} {option}"
        for question, candidates in zip(questions, options, strict=True)
        for option in candidates
    ]
    return firsts, seconds

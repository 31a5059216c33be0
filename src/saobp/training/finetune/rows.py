"""A task's rows as sequences with labels, ready to be drawn in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from saobp.data.tasks import Split, TaskSpec
from saobp.training.finetune.encoding import Layout, Sequences, TokenTable, bucket_length, pair_lengths
from saobp.training.finetune.recipe import FinetuneRecipe

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Rows(Dataset[Batch]):
    """Examples of ``group`` sequences each (the candidates of a choice; else 1) with their labels.

    Asked for several indices at once it gives one padded batch: ``[batch, length]``, or for a choice
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
    """Batches of examples of like length in an order that follows from (seed, epoch) alone."""

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
        return [batches[place] for place in draw.permutation(len(batches))]

    def __len__(self) -> int:
        """Batches of an epoch; only the last pool can end in a smaller one."""
        return -(-len(self.lengths) // self.batch)


class EpochBatches:
    """The batch sampler of a DataLoader; ``set_epoch`` chooses the order."""

    def __init__(self, batches: LengthBatches) -> None:
        self.batches, self.current = batches, 0

    def set_epoch(self, epoch: int) -> None:
        self.current = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches.epoch(self.current))

    def __len__(self) -> int:
        return len(self.batches)


def encode_rows(
    split: Split, spec: TaskSpec, tokenizer: PreTrainedTokenizerBase, recipe: FinetuneRecipe, length: int
) -> Rows:
    """Tokenise a split of a classification, regression or choice task."""
    if spec.kind == "choice":
        firsts, seconds, group = *choice_texts(split, spec), len(spec.labels)
    else:
        firsts, group = split.column(spec.texts[0]), 1
        seconds = split.column(spec.texts[1]) if len(spec.texts) > 1 else None
    table = TokenTable(tokenizer, firsts if seconds is None else [*firsts, *seconds])
    layout = Layout.of(tokenizer)
    first = table.rows(firsts)
    budget = length - layout.specials(seconds is not None)
    labels = split.labels.astype(np.float32) if spec.kind == "regression" else split.labels
    if seconds is None:
        kept = np.minimum(table.lengths[first], budget)
        sequences = Sequences(table, layout, first, kept)
        whole = table.lengths[first]
    else:
        second = table.rows(seconds)
        whole = table.lengths[first] + table.lengths[second]
        kept, kept_second = pair_lengths(table.lengths[first], table.lengths[second], budget)
        sequences = Sequences(table, layout, first, kept, second, np.zeros_like(second), kept_second)
    return Rows(sequences, {"labels": labels}, length, group, cut=float((whole > budget).mean()))


def choice_texts(split: Split, spec: TaskSpec) -> tuple[list[str], list[str]]:
    """Context and candidate of each sequence: a candidate fills the question's gap, or follows it."""
    contexts, options = split.column(spec.texts[0]), split.column(spec.options)
    questions = split.column(spec.texts[1]) if len(spec.texts) > 1 else [""] * len(contexts)
    firsts = [context for context, own in zip(contexts, options, strict=True) for _ in own]
    seconds = [
        option if not question else question.replace("_", option, 1) if "_" in question else f"{question} {option}"
        for question, own in zip(questions, options, strict=True)
        for option in own
    ]
    return firsts, seconds

"""Batches for one process, from any step on.

Batches of several steps are gathered at once and copied while the device computes. No step syncs with the
device, so the host runs ahead and gathers in that time. A background thread would be slower: its numpy calls
wait for the GIL far longer than they take.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from saobp.training.objectives import hidden_count, row_seeds
from saobp.training.recipes import PretrainRecipe

TOGETHER = 8
"""Steps whose batches are gathered and copied at once, at a third of the cost of one by one."""
HELD_OUT_ROWS = 256
"""Most rows of small batches that are evaluated at once: launches cost more than rows."""
HELD_OUT_SEED = 0x5A0BED
"""Seed of held-out masks, whatever the seed of the run: every evaluation masks the same."""
HELD_OUT_TOKENS = 256 * 128
"""Held-out rows are masked as in batches of so many tokens, whatever the recipe's, so that losses compare.
Recorded runs of the recipes ``fast`` and ``modern`` had such batches."""

Batch = dict[str, Tensor]
"""``input_ids`` ``[rows, length]``, ``seeds`` ``[rows]`` and, where the masked share decays, ``counts``
``[rows]``; leading dimensions for several steps."""


class TokenRows(Protocol):
    """Protocol of an infinite sequence of token rows, such as :class:`saobp.data.Blocks`."""

    def __len__(self) -> int: ...

    def at(self, numbers: np.ndarray) -> Batch:
        """``{"input_ids": [len(numbers), length]}``; after the last row comes the first of the next epoch."""
        ...


class BatchShard:
    """This process's shard of every global batch, whose rows do not depend on the number of processes."""

    def __init__(self, recipe: PretrainRecipe, process: int, processes: int, device: torch.device) -> None:
        parts = processes * recipe.accumulation
        if recipe.batch_size % parts:
            raise ValueError(
                f"a batch of {recipe.batch_size} sequences cannot be shared evenly by {processes} processes "
                f"in {recipe.accumulation} parts each: choose a batch size that {parts} divides"
            )
        self.recipe, self.process, self.processes, self.device = recipe, process, processes, device
        self.rows = recipe.batch_size // parts
        # recorded runs of the paper's recipe were evaluated on masks by their own batches
        is_paper = recipe.name == "paper"
        self.held_out_batch = recipe.batch_size if is_paper else max(1, HELD_OUT_TOKENS // recipe.length)

    def held_out(self, rows: TokenRows, batch: int, part: int, count: int) -> Batch:
        """``count`` held-out rows of micro-batch ``part`` of a batch of this process, on its device.

        The masks of a row follow from its number alone.
        """
        first = batch * self.recipe.batch_size + (part * self.processes + self.process) * count
        numbers = first + np.arange(count)
        seeds = [
            row_seeds(HELD_OUT_SEED, number // self.held_out_batch, [number % self.held_out_batch])
            for number in numbers.tolist()
        ]
        ids = rows.at(numbers)["input_ids"]
        return self.moved({"input_ids": ids, "seeds": torch.from_numpy(np.concatenate(seeds))})

    def steps(self, rows: TokenRows, seed: int, first: int, count: int) -> Batch:
        """All micro-batches of some steps, ``[steps, parts, rows, ...]``, in host memory."""
        starts = (np.arange(self.recipe.accumulation) * self.processes + self.process) * self.rows
        steps, indices = first + np.arange(count), starts[:, None] + np.arange(self.rows)
        numbers = np.add.outer(steps * self.recipe.batch_size, indices)
        ids = rows.at(numbers.reshape(-1))["input_ids"]
        seeds = np.array([row_seeds(seed, int(step), indices) for step in steps])
        batch = {
            "input_ids": ids.view(*numbers.shape, -1),
            "seeds": torch.from_numpy(seeds.reshape(numbers.shape)),
        }
        if self.recipe.masked_share_end is not None:
            shares = [self.recipe.share_at(int(step)) for step in steps]
            counts = np.array([hidden_count(share, ids.shape[-1]) for share in shares])
            spread = np.broadcast_to(counts[:, None, None], numbers.shape)
            batch["counts"] = torch.from_numpy(spread.copy())
        if self.device.type != "cuda":
            return batch
        return {name: pinned(tensor) for name, tensor in batch.items()}

    def moved(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}


def pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory. Made by numpy: PyTorch would wake all its threads for it."""
    copy = torch.empty_like(tensor, pin_memory=True)
    np.copyto(copy.numpy(), tensor.numpy())
    return copy


class TrainingStream:
    """Infinite training batches, starting at the step that ``start`` returns when iteration begins."""

    def __init__(self, rows: TokenRows, shard: BatchShard, start: Callable[[], int]) -> None:
        self.rows, self.shard, self.start = rows, shard, start

    def __iter__(self) -> Iterator[Batch]:
        recipe = self.shard.recipe
        for first in itertools.count(self.start(), TOGETHER):
            batches = self.shard.moved(self.shard.steps(self.rows, recipe.seed, first, TOGETHER))
            for step, part in itertools.product(range(TOGETHER), range(recipe.accumulation)):
                yield {name: tensor[step, part] for name, tensor in batches.items()}


def held_out_batches(rows: TokenRows, shard: BatchShard) -> list[Batch]:
    """The first held-out rows, in as many whole global batches as the recipe asks for and the data has.

    One smaller batch if there is less; nothing if the processes cannot share that. Small ones are joined, as
    many as make batches of one size: rows and masks stay.
    """
    recipe = shard.recipe
    wanted = min(recipe.evaluation_rows, len(rows))
    batches = max(1, wanted // recipe.batch_size)
    count = min(shard.rows, wanted // (shard.processes * recipe.accumulation))
    if count == 0:
        return []
    gathered = [
        shard.held_out(rows, number, part, count)
        for number in range(batches)
        for part in range(recipe.accumulation)
    ]
    sizes = range(1, max(1, HELD_OUT_ROWS // count) + 1)
    together = max(size for size in sizes if len(gathered) % size == 0)
    return [joined(gathered[first : first + together]) for first in range(0, len(gathered), together)]


def joined(batches: list[Batch]) -> Batch:
    """Batches as one, of the rows of all."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def health_batch(rows: TokenRows, shard: BatchShard) -> Batch:
    """The first held-out rows, as many as the recipe measures attention on, shared by the processes.

    They are the same however many processes there are, if these divide their number.
    """
    wanted = min(shard.recipe.health_texts, len(rows))
    return shard.held_out(rows, 0, 0, max(1, wanted // shard.processes))

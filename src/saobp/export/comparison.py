"""An exported model beside PyTorch's: the largest difference of their numbers, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saobp.export.formats import Run
from saobp.export.token_model import TokenModel
from saobp.timing import Timing, in_turn, wall_clock

TOLERANCE = 1e-5
"""Largest difference allowed, as a share of the largest number where that is above 1."""


@dataclass(frozen=True)
class Difference:
    """absolute: largest difference at real tokens; largest: the largest number among PyTorch's."""

    absolute: float
    largest: float

    @property
    def is_within_tolerance(self) -> bool:
        return self.absolute <= TOLERANCE * max(1.0, self.largest)


@dataclass(frozen=True)
class Speed:
    """Medians in milliseconds of one call."""

    batch: int
    length: int
    pytorch: float
    exported: float
    ratio: float
    """Median over turns of PyTorch's time over the export's: above 1 the export is faster."""


def difference(model: TokenModel, run: Run, shapes: Sequence[tuple[int, int]]) -> Difference:
    """Compare on batches of random tokens with padding; ``shapes`` are rows and lengths."""
    absolute = largest = 0.0
    for rows, length in shapes:
        batch = model.batch(rows, length)
        real = batch[model.inputs.index("attention_mask")].bool()
        for found, expected in zip(run(*batch), pytorch(model)(*batch), strict=True):
            if expected.shape[:2] == real.shape:
                found, expected = found[real], expected[real]
            apart = (found - expected).abs().max()
            absolute = max(absolute, float(apart.nan_to_num(nan=float("inf"))))
            largest = max(largest, float(expected.abs().max()))
    return Difference(absolute, largest)


def shapes_to_compare(model: TokenModel) -> list[tuple[int, int]]:
    """A single token, a sentence, and a padded batch at another length than the traced one."""
    return [(1, 1), (1, min(16, model.longest)), (4, min(40, model.longest))]


def speeds(
    model: TokenModel, run: Run, shapes: Sequence[tuple[int, int]], *, turns: int = 9, budget: float = 1.5
) -> list[Speed]:
    """Median times without padding, both in turn."""
    found = []
    for rows, length in shapes:
        batch = model.batch(rows, length, padding=False)
        calls: dict[str, Any] = {
            "pytorch": lambda batch=batch: pytorch(model)(*batch),
            "exported": lambda batch=batch: run(*batch),
        }
        timed = in_turn(calls, turns=turns, budget=budget, clock=wall_clock)
        ours, theirs = timed["pytorch"], timed["exported"]
        assert isinstance(ours, Timing)
        assert isinstance(theirs, Timing)
        found.append(Speed(rows, length, ours.median, theirs.median, ours.over(theirs)))
    return found


def pytorch(model: TokenModel) -> Run:
    """The model as it is, with its refinement."""
    forward = model.forward

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            found: tuple[Tensor, ...] = forward(*tensors)
        return found

    return run

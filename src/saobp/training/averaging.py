"""The mean of a model's weights over the last steps of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

FILE = "average.pt"
"""In a checkpoint: the mean so far."""


class WeightAverage:
    """Mean of the weights after every step from ``first`` on.

    Weights are updated in place, never reassigned: a captured step has fixed addresses.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], first: int) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.first = first
        self.mean: list[Tensor] = []

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Add the weights after a step."""
        if step < self.first:
            return
        if not self.mean:
            self.mean = [parameter.detach().clone() for parameter in self.parameters]
        else:
            torch._foreach_lerp_(self.mean, self.parameters, 1 / (step - self.first + 1))

    @torch.no_grad()
    def settle(self) -> None:
        """Replace the weights by the mean."""
        if self.mean:
            torch._foreach_copy_(self.parameters, self.mean)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the weights are the mean, if there is one yet."""
        latest = [parameter.detach().clone() for parameter in self.parameters] if self.mean else []
        self.settle()
        try:
            yield
        finally:
            if latest:
                with torch.no_grad():
                    torch._foreach_copy_(self.parameters, latest)

    def save(self, folder: Path) -> None:
        if self.mean:
            torch.save(self.mean, folder / FILE)

    def load(self, folder: Path) -> None:
        if (folder / FILE).exists():
            device = self.parameters[0].device
            self.mean = torch.load(folder / FILE, map_location=device, weights_only=True)

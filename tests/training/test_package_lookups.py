"""Accelerate's lookup of an optional package: once in a run, not in every step."""

from __future__ import annotations

import accelerate.optimizer
import pytest
import torch
from accelerate import Accelerator

from saobp.training.package_lookups import looked_up_once


def test_a_package_is_looked_up_once_and_accelerate_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def lookup() -> bool:
        asked.append(1)
        return False

    monkeypatch.setattr(accelerate.optimizer, "is_lomo_available", lookup)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD([weight], lr=0.1))
    weight.grad = torch.ones(2)
    with looked_up_once():
        for _ in range(3):
            optimizer.step()
    assert len(asked) == 1
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.7))
    assert accelerate.optimizer.is_lomo_available is lookup

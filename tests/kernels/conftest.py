"""Fixtures shared by the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from call_helpers import clear_plans

from saobp.kernels.call_spec import CallSpec


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    clear_plans()
    yield
    clear_plans()


@pytest.fixture
def weak_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in half types belong to bfloat16; here other types use them too."""
    monkeypatch.setattr(CallSpec, "precise", 0)

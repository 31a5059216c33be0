"""What tests of several kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from saobp.kernels.call_spec import Problem, kept_problem


@pytest.fixture
def weak_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels in half types belong to bfloat16; here other types go the same way."""
    monkeypatch.setattr(Problem, "precise", 0)
    kept_problem.cache_clear()
    yield
    kept_problem.cache_clear()

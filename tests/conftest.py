"""Shared by all tests: unwritten memory is NaN, one thread, reproducible property tests, no hub."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter, which must be asked for before anything imports them.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        from interpreted_bfloat16 import add_bfloat16
        from quick_interpreter import speed_up

        from saobp.kernels import dispatch

        speed_up()
        add_bfloat16()
        dispatch.LACKS_BFLOAT16 = False

settings.register_profile("saobp", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("saobp")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty and its kin give NaN, so that an output nobody wrote cannot pass for one."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(autouse=True)
def log_left_as_found() -> Iterator[None]:
    """A test or a command it runs that mutes the package's log would silence whichever test comes next."""
    logger = logging.getLogger("saobp")
    before = logger.level
    yield
    assert logger.level == before


@pytest.fixture
def figures_unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of the lab's pages are made but not rendered, which takes most of the time of a page."""
    monkeypatch.setattr("saobp.lab.result_page.save_figure", lambda *_: [])

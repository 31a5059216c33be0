"""Chromium for the tests that open the page, started once, and pages to open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import HOSTILE, NO_CHROMIUM, Opened, chromium_path

from saobp.metrics.diagnosis.loading import example_model
from saobp.report import explorer_data, write_explorer, write_report
from saobp.testing.fake_runs import make_finetune, make_run
from saobp.testing.tiny_models import tiny_model


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The system's Chromium, driven by Playwright, which downloads nothing.

    It opens pages of these tests only, so it may go without the sandbox, which root and many containers lack.
    """
    path = chromium_path()
    if path is None:
        pytest.skip(NO_CHROMIUM)
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Opened]]:
    """Opens a file or an address and keeps what it said and asked for."""
    contexts = []

    def opened(target: Path | str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Opened:
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(60_000)  # a busy machine needs long
        page = Opened(context.new_page())
        page.open(target.as_uri() if isinstance(target, Path) else target)
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A page of two runs, an encoder and a decoder to explore, and hostile words; and the explorers' data."""
    root = tmp_path_factory.mktemp("page")
    high = {"factor": "high", "strength": "learned", "steps": 1, "damping": 0.0, "future": "strict"}
    runs = [
        make_run(root / "plain <i>run"),
        make_run(root / "high", refinement=high),
        make_finetune(root / "sst2"),
    ]
    tokenizer = example_model()[1]
    explorers = []
    for run, family in zip(runs, ("bert", "gpt2"), strict=False):
        data = explorer_data(tiny_model(family), tokenizer, [HOSTILE, "a b c d e f g"], subject=family)
        write_explorer(data, run)
        explorers.append(data)
    return write_report(runs, root / "report.html", title=f"Page {HOSTILE}", sample=HOSTILE), explorers

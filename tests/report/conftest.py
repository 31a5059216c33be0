"""Chromium for the tests that open the page, started once, and a page to open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from saobp.testing.browser import NO_CHROMIUM, Opened, chromium_path


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
        context.set_default_timeout(5_000)
        page = Opened(context.new_page())
        page.open(target.as_uri() if isinstance(target, Path) else target)
        return page

    yield opened
    for context in contexts:
        context.close()

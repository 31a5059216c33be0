"""README and docs/use.md do what they say: Python blocks run as printed, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [ROOT / "README.md", ROOT / "docs" / "use.md"]
"""Pages whose Python blocks run in order."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Mark and code of each Python block."""
    return re.findall(r"^```python(.*?)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def run(page: Path) -> dict[str, Any]:
    """All blocks in one namespace, from top to bottom, without those that are marked as needing the hub."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)  # a model of random weights may end its text at once
    for mark, code in blocks(page):
        if mark.strip() != "hub":
            exec(compile(code, page.name, "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore")
def test_blocks_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(ROOT / "README.md")
    assert names["model"].config.saobp["strength"] == "learned"
    assert len(names["health"].heads()) == 8
    assert all(head in names["health"].heads() for head in names["collapsed"])


@pytest.mark.filterwarnings("ignore")
def test_blocks_of_the_page_on_use_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(ROOT / "docs" / "use.md")
    assert names["output"].shape == (2, 4, 16, 32)
    assert names["refined"].sum(-1).allclose(names["rows"].sum(-1))
    assert names["text"].shape == (1, 11)
    assert names["model"].config.saobp["strength"] == 0.2
    assert len(names["health"].heads()) == 8


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_blocks_for_the_hub_are_marked_in_the_text(page: Path) -> None:
    text = page.read_text("utf-8")
    for mark, code in blocks(page):
        if mark.strip() == "hub":
            paragraphs = text[: text.index(code)].split("\n\n")
            assert "needs the Hugging Face hub" in paragraphs[-2]
        else:
            assert ".from_pretrained(" not in code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

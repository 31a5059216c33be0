"""The README does what it says: its Python blocks run as printed, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = re.findall(r"^```python(.*?)\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)


@pytest.mark.filterwarnings("ignore")
def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace, from top to bottom, without those that are marked as needing the hub."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    local = [code for mark, code in BLOCKS if mark.strip() != "hub"]
    assert len(local) >= 6
    for code in local:
        exec(compile(code, "README.md", "exec"), names)
    assert names["output"].shape == (2, 4, 16, 32)
    assert names["refined"].sum(-1).allclose(names["rows"].sum(-1))
    assert names["text"].shape == (1, 11)
    assert names["model"].config.saobp["strength"] == 0.2
    assert len(names["health"].heads()) == 8


def test_blocks_for_the_hub_are_marked_in_the_text() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for mark, code in BLOCKS:
        if mark.strip() == "hub":
            paragraphs = text[: text.index(code)].split("\n\n")
            assert "needs the Hugging Face hub" in paragraphs[-2]
        else:
            assert "from_pretrained" not in code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

"""The documentation site builds without a warning, holds every page and public name, and loads nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documentation") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_in_the_navigation(site: Path) -> None:
    """``omitted_files: warn`` makes a page that is not there an error of the build."""
    first = (site / "index.html").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        name = "pages" if page.name == "index.md" else page.stem
        assert (site / name / "index.html").is_file(), page.name
        assert f'href="{name}/"' in first, page.name


def test_headings_of_pages_are_headings_of_the_site(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        html = (site / ("pages" if page.name == "index.md" else page.stem) / "index.html").read_text("utf-8")
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert len(re.findall(r"<h2 ", html)) >= len(re.findall(r"^## ", text, re.MULTILINE)), page.name


def test_the_api_page_has_the_docstring_of_every_public_name(site: Path) -> None:
    html = (site / "api/index.html").read_text("utf-8")
    listed = (ROOT / "tests/packaging/public_names.txt").read_text().splitlines()
    for name in (line.partition(":")[0] for line in listed if line.startswith("saobp.")):
        twice = re.fullmatch(r"saobp\.(?:metrics|transformers)\.(probe|watch|apply|load|remove)", name)
        if name != "saobp.nn" and not (twice and f'id="saobp.{twice[1]}"' in html):
            assert f'id="{name}"' in html, name
    assert ":func:" not in html


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?(https?:[^\"> ]*)", page.read_text("utf-8")
        )
        assert not loaded, page

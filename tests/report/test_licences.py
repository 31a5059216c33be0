"""A page carries the licence notices of the software inside it."""

from __future__ import annotations

import html
import re
from importlib import resources
from pathlib import Path

from plotly.offline import get_plotlyjs

from saobp.report import write_report
from saobp.testing.fake_runs import make_run

NOTICES = resources.files("saobp.report").joinpath("page", "notices.txt").read_text(encoding="utf-8")


def test_pages_and_the_project_have_the_notices(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", steps=20)], tmp_path / "page.html")
    assert html.escape(NOTICES, quote=False) in page.read_text().replace("&#34;", '"').replace("&#39;", "'")
    assert (Path(__file__).parents[2] / "NOTICE").read_text() == NOTICES


def test_every_package_that_plotly_names_is_in_the_notices() -> None:
    """So a newer plotly with another package inside is noticed."""
    script = get_plotlyjs()
    comments = [text for text in re.findall(r"/\*[*!].*?\*/", script, re.DOTALL) if "\\n" not in text]
    named = {
        name
        for text in comments
        for name in [
            *re.findall(r"^(@?[\w.-]+)/[^\s:]*:$", text, re.MULTILINE),
            *re.findall(r"^ \* ([\w-]+) <http", text, re.MULTILINE),
        ]
    }
    assert {"polybooljs", "maplibre-gl", "pad-left"} <= named
    assert not [name for name in named if name not in NOTICES]
    assert "MIT license" in script[:200]

"""Parse a written page, for tests."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any


def page_of(path: Path) -> dict[str, Any]:
    """The data inside a page."""
    text = path.read_text(encoding="utf-8")
    inside = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    data: dict[str, Any] = json.loads(inside)
    return data


def words_of(path: Path) -> str:
    """The body of a page before any script has run, with tags."""
    return html.unescape(
        path.read_text(encoding="utf-8").partition('<main id="page">')[2].partition("</main>")[0]
    )


def figure(path: Path, name: str) -> dict[str, Any]:
    """A plotly figure of a page's curves."""
    return next(one for one in page_of(path)["curves"] if one["id"] == name)

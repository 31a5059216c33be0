"""What a written page holds, for tests of it."""

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
    """What a reader sees of a page before any script has run, tags between it."""
    return html.unescape(
        path.read_text(encoding="utf-8").partition('<main id="page">')[2].partition("</main>")[0]
    )


def figure(path: Path, name: str) -> dict[str, Any]:
    """A chart of a page's curves as plotly gets it."""
    return next(one for one in page_of(path)["curves"] if one["id"] == name)

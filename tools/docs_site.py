"""What the documentation site adds to MkDocs: links out of ``docs/``, which GitHub follows, lead somewhere.

The README is the first page and ``docs/index.md`` the list of all pages. Other files that a page links to
(results, benchmarks, source) are copied under ``repository/``: texts as pages, all else as files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)#\s]+)|(<img [^>]*src=\")([^\"]+)")
PLACES = {ROOT / "README.md": "index.md", DOCS / "index.md": "pages.md"}


def place(path: Path) -> str:
    """Where a file of the repository stands in the site."""
    if path in PLACES:
        return PLACES[path]
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return "repository/" + path.relative_to(ROOT).as_posix()


def target(page: Path, link: str) -> Path | None:
    """The file that a link of a page leads to; of a folder its README. None for an address or nothing."""
    if "://" in link:
        return None
    path = Path(os.path.normpath(page.parent / link))
    if path.is_dir():
        path /= "README.md"
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def linked(page: Path) -> set[Path]:
    links = (one[2] or one[4] for one in LINK.finditer(page.read_text("utf-8")))
    return {path for link in links if (path := target(page, link)) is not None}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README and all that pages link to outside ``docs/``, and what those link to."""
    files.remove(files.src_uris["index.md"])
    pages = [*PLACES, *DOCS.glob("*.md")]
    seen = set(pages)
    while pages:
        new = linked(pages.pop()) - seen
        seen |= new
        pages += [path for path in new if path.suffix == ".md"]
    for path in sorted(seen):
        if path in PLACES or not path.is_relative_to(DOCS):
            files.append(File.generated(config, place(path), abs_src_path=str(path)))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Takes Sphinx's roles off: docstrings write :func:`name`."""
    return re.sub(r":(?:func|class|meth|attr|data|mod):(?=<code>)", "", html)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrites links to the site's layout, and puts docstrings where the API page lists names.

    Of ```` ```python hub ```` only the language is left: MkDocs would not take it for a code block.
    """
    here = Path(str(page.file.abs_src_path))
    start = Path(page.file.src_uri).parent

    def rewritten(found: re.Match[str]) -> str:
        before, link = (found[1], found[2]) if found[1] else (found[3], found[4])
        path = target(here, link)
        return found[0] if path is None else before + os.path.relpath(place(path), start)

    if page.file.src_uri == "api.md":
        markdown = re.sub(r"^- `(saobp\.[\w.]+)`$", r"::: \1\n", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^(```\w+) [\w ]+$", r"\1", markdown, flags=re.MULTILINE)
    return LINK.sub(rewritten, markdown)

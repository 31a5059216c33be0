"""What the page embeds: its own modules as one inline script, and plotly, compressed.

The files in ``page/`` are ordinary ES modules, which Node and editors read as they are. A page opened from
disk may not import files, so they are concatenated without a build tool: dependencies first, without imports
and the word ``export``. The result is one module with one scope, in which every top-level name must be
unique; a test checks that.

Plotly's script comes from its Python package. It is stored compressed (2 MB instead of 4.8) in an element
that no browser runs; the page unpacks it, and the content security policy names the hash of the unpacked
text, so that it and nothing else may run.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import re
from dataclasses import dataclass
from importlib import resources

from saobp.extras import MissingPackageError


class MissingPlotlyError(MissingPackageError):
    """Plotly is not installed, so no page can be written."""

    def __init__(self) -> None:
        super().__init__("the page", "plotly")


@dataclass(frozen=True)
class Library:
    """``packed`` is base64 of gzip; ``source`` is the script's hash in a content security policy."""

    packed: str
    source: str


@functools.cache
def plotly_library() -> Library:
    """The library, cached per process. Raises :class:`MissingPlotlyError`."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise MissingPlotlyError from None
    script = get_plotlyjs().encode()
    return Library(base64.b64encode(gzip.compress(script, 9, mtime=0)).decode(), source_of(script))


def source_of(script: bytes) -> str:
    """``'sha256-...'`` of a script for a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"


_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|const|let|class)", re.MULTILINE)


@functools.cache
def read_asset(name: str) -> str:
    """A file of the page's folder."""
    return resources.files("saobp.report").joinpath("page", name).read_text(encoding="utf-8")


@functools.cache
def joined_script() -> str:
    """``main.js`` and everything that it imports, each once, as the text of one module."""
    parts: dict[str, str] = {}
    _add("main.js", parts, ())
    return "\n".join(parts.values())


def _add(name: str, parts: dict[str, str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"modules of the page import each other in a circle: {' > '.join((*above, name))}")
    if name in parts:
        return
    text = read_asset(name)
    for needed in _IMPORT.findall(text):
        _add(needed, parts, (*above, name))
    body = _EXPORT.sub("", _IMPORT.sub("", text))
    if re.search(r"^(import|export)\b", body, re.MULTILINE):
        raise ValueError(f'{name} must import as import {{ a }} from "./b.js"; and export declarations only')
    parts[name] = body.strip() + "\n"

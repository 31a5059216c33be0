"""Plotly for the page: the script of its Python package, compressed to be embedded.

It is stored compressed (2 MB instead of 4.8) in an element that no browser runs; the page unpacks it, and the
content security policy names the hash of the unpacked text, so that it and nothing else may run.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
from dataclasses import dataclass

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

"""The page's modules as one inline script, without a build tool.

The files in ``page/`` are ordinary ES modules, which Node and editors read as they are. A page opened from
disk may not import files, so they are concatenated: dependencies first, without imports and the word
``export``. The result is one module with one scope, in which every top-level name must be unique; a test
checks that.
"""

from __future__ import annotations

import functools
import re
from importlib import resources

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

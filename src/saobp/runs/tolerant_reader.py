"""Tolerant reading of a run's files: unreadable parts are skipped, with a sentence for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Problems = list[str]
LARGEST = 1e100
"""Bound on values: differences of such numbers are still finite."""


def try_read_object(path: Path, problems: Problems, without: str | None = None) -> dict[str, Any]:
    """The object of a JSON file; empty, with a sentence in ``problems``, where there is none.

    ``without`` describes the consequence of a missing file; None means that it is optional.
    """
    if not path.is_file():
        if without is not None:
            problems.append(f"{path.name} is missing: {without}.")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        problems.append(f"{path.name} cannot be read as JSON and is left out.")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name} holds no JSON object and is left out.")
        return {}
    return content


def try_read_lines(
    path: Path, problems: Problems, without: str, is_good: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines for which ``is_good`` holds; others are counted and skipped."""
    if not path.is_file():
        problems.append(f"{path.name} is missing: {without}.")
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        problems.append(f"{path.name} cannot be read: {without}.")
        return []
    written = [line for line in lines if line.strip()]
    good = [entry for line in written if (entry := _entry(line)) is not None and is_good(entry)]
    bad = len(written) - len(good)
    if bad:
        problems.append(f"{bad} of {len(written)} lines of {path.name} cannot be read and are left out.")
    elif not written:
        problems.append(f"{path.name} is empty: {without}.")
    return good


def number(value: Any) -> float | None:
    """A finite number within ``LARGEST``, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST <= value <= LARGEST else None


def flat(values: Any, prefix: str = "", depth: int = 4) -> list[tuple[str, Any]]:
    """The leaves of nested objects by dotted name; lists stay whole."""
    if not isinstance(values, dict) or depth == 0:
        return [(prefix, values)] if prefix else []
    return [
        leaf
        for name, value in values.items()
        for leaf in flat(value, f"{prefix}.{name}" if prefix else str(name), depth - 1)
    ]


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None

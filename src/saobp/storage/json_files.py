"""JSON and JSON Lines files; errors name the file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saobp.storage.atomic import naming, write_atomically


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def finite(value: Any) -> Any:
    """The same value with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON (line {error.lineno}, column {error.colno})") from None
    except (UnicodeDecodeError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file; raises on anything else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object but {json.dumps(content)[:40]}")
    return content


def append_line(path: Path, content: Mapping[str, Any]) -> None:
    """Append an object to a JSON Lines file."""
    with naming(path), path.open("a") as file:
        file.write(json.dumps(content) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file; a truncated last line is skipped."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    objects = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}: line {number}, column {error.colno} is not JSON") from None
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: line {number} holds no JSON object")
        objects.append(entry)
    return objects


def keep_lines_up_to(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a truncated last one; every line must have its step."""
    if path.exists():
        lines = read_lines(path)
        for line in lines:
            if not isinstance(line.get("step"), int):
                raise ValueError(f"{path}: a line has no step, but {json.dumps(line)[:60]}")
        kept = [json.dumps(line) for line in lines if line["step"] <= step]
        write_atomically(path, "".join(f"{line}\n" for line in kept))

"""Errors of loading a saved model as one sentence that names the damaged file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open

from saobp.storage.atomic import first_line

OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files of a model that hold a JSON object; others, of other tools too, may hold a list."""


@contextmanager
def clear_load_errors(folder: str, what: str = "a model") -> Iterator[None]:
    """Re-raise loading errors of libraries as a ValueError about ``folder``."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise ValueError(f"cannot load {what} from {folder!r}: {_cause(Path(folder), problem)}") from problem


def _cause(folder: Path, problem: Exception) -> str:
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return f"{file.name} is not JSON"
        if file.name in OBJECTS and not isinstance(content, dict):
            return f"{file.name} holds no JSON object but {json.dumps(content)[:40]}"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            safe_open(file, "pt")
        except (SafetensorError, OSError) as error:
            return f"{file.name} is damaged ({first_line(error)}): restore it, or train the model again"
    if isinstance(problem, UnpicklingError):
        names = ", ".join(file.name for file in sorted(folder.glob("*.bin")))
        return f"{names} holds more than weights, which could run code: save the model as safetensors"
    if "ignore_mismatched_sizes" in str(problem):
        return "the weights have other sizes than config.json says"
    return " ".join(str(problem).split("\n\n")[0].split()) or first_line(problem)

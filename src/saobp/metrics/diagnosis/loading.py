"""Models and texts for a diagnosis, from folders, files, the hub, or built in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from saobp.metrics.diagnosis.example_model import example_model
from saobp.refinement import Refinement
from saobp.storage.atomic import first_line
from saobp.storage.manifest import check_manifest
from saobp.storage.model_folders import checked_folder
from saobp.transformers import apply
from saobp.transformers.load_errors import clear_load_errors

EXAMPLE = "planted example"
EXAMPLE_TEXT = (
    "Each head of this model attends by position. The first attends to all alike, the second to itself, "
    "the third to the first token, the fourth one token back; the fifth sends each third to the next."
)


def load_model(
    name: str, refinement: Refinement | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer from its folder, its run's folder or the hub, refined as saved or given."""
    if name == EXAMPLE:
        model, tokenizer = example_model()
    else:
        model, tokenizer = _from_pretrained(name)
    if refinement is not None:
        apply(model, refinement)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), tokenizer


def is_refinement(text: str) -> bool:
    """Whether ``text`` is the written form of a refinement, right or wrong, rather than a model's name."""
    if Path(text).exists():
        return False
    if ":" in text:  # not allowed in hub names
        return True
    try:
        Refinement.parse(text)
    except ValueError:
        return False
    return True


def read_texts(path: Path, limit: int) -> list[str]:
    """Texts of a file, split at blank lines, or at line ends if it has none."""
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    try:
        whole = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not text in UTF-8") from None
    parts = whole.replace("\r\n", "\n").split("\n\n")
    if len([part for part in parts if part.strip()]) < 2:
        parts = whole.splitlines()
    return _non_empty(parts, limit, f"{str(path)!r}")


def dataset_texts(name: str, split: str, column: str | None, limit: int) -> list[str]:
    """Texts of a column of a dataset, by default the first column of strings."""
    import datasets

    try:
        data = datasets.load_dataset(name, split=split, streaming=True)
        rows = list(data.take(limit))
    except Exception as problem:
        raise ValueError(f"cannot read split {split!r} of dataset {name!r}: {first_line(problem)}") from None
    strings = [key for key, value in rows[0].items() if isinstance(value, str)] if rows else []
    if column is None and strings:
        column = strings[0]
    if column not in strings:
        known = ", ".join(strings) or "none"
        raise ValueError(f"dataset {name!r} has no column of text called {column!r}: it has {known}")
    return _non_empty([row[column] for row in rows], limit, f"column {column!r} of {name!r}")


def _from_pretrained(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    place = checked_folder(name)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()
    check_manifest(Path(place))
    with clear_load_errors(place, "a model with its tokenizer"):
        tokenizer: Any = AutoTokenizer.from_pretrained(place)
        model: Any = AutoModel.from_pretrained(place)
    return model, tokenizer


def _non_empty(texts: Iterable[str], limit: int, where: str) -> list[str]:
    kept = [text.strip() for text in texts if text.strip()]
    if not kept:
        raise ValueError(f"{where} holds no text")
    return kept[:limit]

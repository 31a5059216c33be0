"""Tasks from the Hugging Face hub, brought to the same columns as the files of a data folder."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from saobp.data.tasks.catalogue import TaskSpec
from saobp.storage.atomic import first_line

_SPLITS = {("mnli", "validation"): "validation_matched"}


def read_hub(spec: TaskSpec, split: str) -> pa.Table:
    """Rows of a split by the ``datasets`` library, which is imported here and nowhere else in this folder."""
    from datasets import load_dataset

    path, name = spec.hub
    try:
        rows = load_dataset(path, name, split=_SPLITS.get((spec.name, split), split))
    except Exception as problem:
        raise FileNotFoundError(
            f"the hub could not give {spec.name} ({first_line(problem)}): give a data folder by --data-dir"
        ) from problem
    table = rows.data.table if hasattr(rows.data, "table") else rows.with_format("arrow")[:]
    return clean_hellaswag(table) if spec.name == "hellaswag" else table


def clean_hellaswag(table: pa.Table) -> pa.Table:
    """HellaSwag's raw rows without the marks of its source (``[title]``, ``[step]``), labels as numbers."""
    rows: list[dict[str, Any]] = table.to_pylist()
    return pa.table(
        {
            "ctx": [_without_marks(f"{row['ctx_a']} {row['ctx_b'].capitalize()}") for row in rows],
            "endings": [[_without_marks(ending) for ending in row["endings"]] for row in rows],
            "label": [int(row["label"]) for row in rows],
        }
    )


def _without_marks(text: str) -> str:
    titled = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", titled).replace("  ", " ").strip()

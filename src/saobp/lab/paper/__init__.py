"""The paper's numbers, as its tables print them."""

from __future__ import annotations

import csv
import functools
from importlib import resources

TABLES = (
    "baselines_small",
    "cost",
    "decoder",
    "glue",
    "gtd_correlation",
    "gtd_race_middle",
    "models",
    "pretraining",
    "sparsity",
    "tasks",
)


@functools.cache
def paper_table(name: str) -> list[dict[str, str]]:
    """Rows of one of TABLES, cells as they are written."""
    if name not in TABLES:
        raise ValueError(f"the paper has no table {name!r}: it has {', '.join(TABLES)}")
    text = resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def paper_values(table: str, column: str, size: str) -> dict[str, float]:
    """A column by factor, for one size; empty for a size that the paper does not have."""
    return {row["factor"]: float(row[column]) for row in paper_table(table) if row["size"] == size}

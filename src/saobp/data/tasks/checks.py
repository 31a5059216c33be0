"""Validation of task rows. Every error is one sentence with file, row and column."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saobp.data.tasks.catalogue import TaskSpec

MOST_OVERLAP = 0.05
"""Share of validation rows that may also be training rows (CoLA, as published, has 1.5 %)."""


class WrongRowsError(ValueError):
    """A file whose rows do not fit its task."""


def check_rows(table: pa.Table, spec: TaskSpec, where: str) -> np.ndarray:
    """Check a table of a task and return its labels.

    Classes give int64 indices, regression float64, a choice the index of the right option, and a span the
    number of its accepted answers.
    """
    missing = [name for name in spec.columns if name not in table.column_names]
    if missing:
        raise WrongRowsError(
            f"{where} has no column {missing[0]!r}: {spec.name} needs {', '.join(spec.columns)}, "
            f"and the file has {', '.join(table.column_names)}"
        )
    if table.num_rows == 0:
        raise WrongRowsError(f"{where} has no rows")
    for name in spec.texts:
        _check_text(table, name, where)
    if spec.options:
        _check_options(table, spec, where)
    _no_nulls(table, spec.label, where)
    if spec.kind == "span":
        return _answers(table, spec, where)
    if spec.kind == "regression":
        return _scores(table, spec, where)
    return _classes(table, spec, where)


def check_overlap(
    train: pa.Table, validation: pa.Table, spec: TaskSpec, files: tuple[str, str]
) -> str | None:
    """A note on validation rows that are also in train, or None; raises above ``MOST_OVERLAP``."""
    seen = set(_identities(train, spec))
    rows = list(_identities(validation, spec))
    shared = [row for row, identity in enumerate(rows) if identity in seen]
    if not shared:
        return None
    what = " and ".join(spec.identity)
    if len(shared) > MOST_OVERLAP * len(rows):
        raise WrongRowsError(
            f"{len(shared)} of {len(rows)} rows of {files[1]} are also in {files[0]} (the first is row "
            f"{shared[0] + 1}, compared by column {what}): one of the two files is the wrong one"
        )
    return f"{len(shared)} of {len(rows)} validation rows have the {what} of a training row"


def _identities(table: pa.Table, spec: TaskSpec) -> Iterator[tuple[str, ...]]:
    return zip(*(map(str, table[name].to_pylist()) for name in spec.identity), strict=True)


def _check_text(table: pa.Table, name: str, where: str) -> None:
    column_type = table.schema.field(name).type
    if not (pa.types.is_string(column_type) or pa.types.is_large_string(column_type)):
        raise WrongRowsError(f"column {name!r} of {where} holds {column_type}, not text")
    _no_nulls(table, name, where)


def _no_nulls(table: pa.Table, name: str, where: str) -> None:
    if table[name].null_count:
        row = int(np.argmax(np.asarray(pc.is_null(table[name]))))
        raise WrongRowsError(f"{_where(where, row, name)} is empty")


def _check_options(table: pa.Table, spec: TaskSpec, where: str) -> None:
    _no_nulls(table, spec.options, where)
    expected = len(spec.labels)
    for row, options in enumerate(table[spec.options].to_pylist()):
        if (
            not isinstance(options, list)
            or len(options) != expected
            or not all(isinstance(option, str) for option in options)
        ):
            raise WrongRowsError(
                f"{_where(where, row, spec.options)} is not a list of {expected} texts but {_short(options)}"
            )


def _classes(table: pa.Table, spec: TaskSpec, where: str) -> np.ndarray:
    values = table[spec.label].to_pylist()
    letters = {name: index for index, name in enumerate(spec.labels)}
    labels = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        index = letters.get(value, -1) if isinstance(value, str) else value
        if not isinstance(index, int) or not 0 <= index < len(spec.labels):
            allowed = ", ".join(spec.labels) if isinstance(value, str) else f"0 to {len(spec.labels) - 1}"
            raise WrongRowsError(
                f"{_where(where, row, spec.label)} is {_short(value)}, but a label is {allowed}"
            )
        labels[row] = index
    if len(values) > 100 and len(np.unique(labels)) == 1:
        raise WrongRowsError(
            f"every row of {where} has {values[0]!r} in column {spec.label!r}: the labels are missing"
        )
    return labels


def _scores(table: pa.Table, spec: TaskSpec, where: str) -> np.ndarray:
    column_type = table.schema.field(spec.label).type
    if not (pa.types.is_floating(column_type) or pa.types.is_integer(column_type)):
        raise WrongRowsError(f"column {spec.label!r} of {where} holds {column_type}, not numbers")
    scores = table[spec.label].to_numpy().astype(np.float64)
    wrong = np.flatnonzero(~((scores >= 0) & (scores <= 5)))
    if len(wrong):
        cell = _where(where, int(wrong[0]), spec.label)
        raise WrongRowsError(f"{cell} is {scores[wrong[0]]:g}, but a score of {spec.name} is 0 to 5")
    return scores


def _answers(table: pa.Table, spec: TaskSpec, where: str) -> np.ndarray:
    """Every accepted answer must stand in its context where the file says it does."""
    contexts = table["context"].to_pylist()
    counts = np.empty(len(contexts), dtype=np.int64)
    for row, (context, answers) in enumerate(zip(contexts, table[spec.label].to_pylist(), strict=True)):
        texts, starts = _fields(answers)
        if not texts or len(texts) != len(starts):
            raise WrongRowsError(
                f"{_where(where, row, spec.label)} has {len(texts)} texts and {len(starts)} starts: "
                "squad needs at least one answer and a start for each"
            )
        for text, start in itertools.zip_longest(texts, starts):
            if not text or start < 0 or context[start : start + len(text)] != text:
                raise WrongRowsError(
                    f"{_where(where, row, spec.label)} says that {_short(text)} stands at character {start} "
                    f"of the context, but there stands {_short(context[start : start + len(text)])}"
                )
        counts[row] = len(texts)
    return counts


def _fields(answers: Any) -> tuple[list[str], list[int]]:
    if not isinstance(answers, dict):
        return [], []
    return answers.get("text") or [], answers.get("answer_start") or []


def _where(where: str, row: int, column: str) -> str:
    return f"row {row + 1}, column {column!r} of {where}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Stream parquet and text files; errors name file, row and column."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

ROWS_AT_ONCE = 64
LONGEST_DOCUMENT = 2**20
"""Characters of a text that may be one document; a longer one is cut, at a blank line, a line or a blank."""
LONGEST_ROW = 2**24
"""Characters of a row that may be one document: a book is, a whole collection on one line is not."""


def parquet_rows(file: Path, column: str) -> Iterator[str]:
    """The strings of one column; raises on the first row that is not one."""
    opened = open_parquet(file, column)
    number = 0
    try:
        for batch in opened.iter_batches(batch_size=ROWS_AT_ONCE, columns=[column]):
            values = batch.column(0)
            if pyarrow.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            try:
                texts = values.to_pylist()
            except UnicodeDecodeError:
                texts = [
                    _decoded(value, file, column, number + index) for index, value in enumerate(values, 1)
                ]
            for text in texts:
                number += 1
                if text is None:
                    raise ValueError(f"row {number} of column {column!r} in {file} is null, not text")
                yield text
    except (pyarrow.ArrowException, OSError) as problem:
        raise ValueError(f"{file} is corrupt after row {number} of column {column!r}: {problem}") from problem


def open_parquet(file: Path, column: str) -> Any:
    """Open a parquet file; raises unless it has this column, as text, and a row."""
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty: it has 0 bytes")
    try:
        opened = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as problem:
        raise ValueError(f"{file} is not a readable parquet file: {problem}") from problem
    schema = opened.schema_arrow
    if column not in schema.names:
        raise ValueError(f"{file} has no column {column!r}; its columns are {', '.join(schema.names)}")
    column_type = schema.field(column).type
    column_type = column_type.value_type if pyarrow.types.is_dictionary(column_type) else column_type
    if not (pyarrow.types.is_string(column_type) or pyarrow.types.is_large_string(column_type)):
        raise ValueError(f"column {column!r} in {file} holds {column_type}, not text")
    if opened.metadata.num_rows == 0:
        raise ValueError(f"{file} is empty: its column {column!r} has 0 rows")
    return opened


def parquet_bytes(file: Path, column: str) -> int:
    """Approximate bytes of text of a column, from the file's footer."""
    metadata = open_parquet(file, column).metadata
    index = metadata.schema.names.index(column)
    groups = range(metadata.num_row_groups)
    return sum(metadata.row_group(group).column(index).total_uncompressed_size for group in groups)


def text_documents(file: Path) -> Iterator[str]:
    """A UTF-8 file as a document of paragraphs; only a very long file becomes several."""
    lines: list[str] = []
    characters = 0
    for line in _lines(file):
        if characters >= LONGEST_DOCUMENT and (not line.strip() or characters >= 2 * LONGEST_DOCUMENT):
            yield from _unless_blank(lines)
            lines, characters = [], 0
        lines.append(line)
        characters += len(line)
    yield from _unless_blank(lines)


def cut_row(text: str) -> Iterator[str]:
    """A row as a document, or parts of one that is too long, cut before a blank where there is one."""
    start = 0
    while len(text) - start > LONGEST_ROW:
        blank = text.rfind(" ", start + 1, start + LONGEST_ROW)
        stop = start + LONGEST_ROW if blank < 0 else blank
        yield text[start:stop]
        start = stop
    yield text[start:]


def _unless_blank(lines: list[str]) -> Iterator[str]:
    if (text := "".join(lines).strip("\n")) and text.strip():
        yield text


def _lines(file: Path) -> Iterator[str]:
    """The lines of a file; one longer than a document is split."""
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty: it has 0 bytes")
    number, column, rest = 1, 1, b""
    with file.open("rb") as contents:
        contents.seek(len(codecs.BOM_UTF8) if contents.read(3) == codecs.BOM_UTF8 else 0)
        while raw := rest + (read := contents.readline(LONGEST_DOCUMENT)):
            goes_on = len(read) == LONGEST_DOCUMENT and not read.endswith(b"\n")
            cut = _last_break(raw) if goes_on else len(raw)
            raw, rest = raw[:cut], raw[cut:]
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as problem:
                column += len(raw[: problem.start].decode("utf-8"))
                raise ValueError(
                    f"{file} is not UTF-8: line {number}, column {column} "
                    f"holds the byte 0x{raw[problem.start]:02x}"
                ) from None
            yield line.replace("\r\n", "\n")
            number, column = (number, column + len(line)) if goes_on else (number + 1, 1)


def _last_break(raw: bytes) -> int:
    """Where the first part of a long line ends: before its last blank, else between two characters."""
    blank = raw.rfind(b" ")
    if blank > 0:
        return blank
    cut = len(raw) - 1
    while cut > 1 and raw[cut] & 0xC0 == 0x80:  # inside a character
        cut -= 1
    return max(cut, 1)


def _decoded(value: Any, file: Path, column: str, number: int) -> str | None:
    try:
        return value.as_py()
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"row {number} of column {column!r} in {file} is not UTF-8: its byte {problem.start + 1} "
            f"is 0x{problem.object[problem.start]:02x}"
        ) from None

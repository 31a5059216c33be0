"""Synthetic texts and tasks in the layout of a data folder, for the smoke scale: no download."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from saobp.data.tasks import TASKS, TaskSpec
from saobp.storage.atomic import replacing

SYNTHETIC = "made-up"
"""Name of the corpus of synthetic texts."""
DOCUMENTS, ROWS = 240, 32
NOUNS = (
    *("river", "stone", "garden", "window", "letter", "doctor"),
    *("market", "bridge", "captain", "winter", "music", "horse"),
)
VERBS = ("finds", "takes", "leaves", "paints", "carries", "watches", "follows")
SIGNS = ("bad", "good", "strange")
"""The word that determines the label."""
COLOURS = ("red", "blue", "green", "brown", "white")

Row = dict[str, Any]


def write_synthetic_data(folder: Path) -> Path:
    """A data folder with synthetic texts and every task, written atomically; an existing one is reused."""
    if not folder.exists():
        with replacing(folder) as new:
            write_tasks(new, rows=ROWS)
            draw = random.Random(0)
            texts = [{"text": _document(draw)} for _ in range(DOCUMENTS)]
            write_rows(new / SYNTHETIC / "part00.parquet", texts)
    return folder


def _document(draw: random.Random) -> str:
    parts = []
    for _ in range(12):
        parts.append(sentence(draw))
        if draw.random() < 0.5:
            parts.append(f"the {draw.choice(NOUNS)} is {draw.choice([*SIGNS, *COLOURS])} .")
    return " ".join(parts)


def write_tasks(folder: Path, rows: Mapping[str, int] | int = 24, seed: int = 0) -> Path:
    """Write every task (and WikiText) below ``folder`` and return it; large training sets are partial."""
    for name, spec in TASKS.items():
        count = rows if isinstance(rows, int) else rows.get(name, 24)
        partial = name in ("qqp", "mnli", "qnli", "squad")
        train = "train_subset7k" if partial else spec.train[0]
        validation = "wang_dev10k" if name == "qqp" else spec.validation[0]
        splits = [train, validation, *(["test"] if "test" in spec.official else [])]
        for number, file in enumerate(splits):
            write_rows(
                folder / spec.folder / f"{file}.parquet", task_rows(spec, count, seed=10 * seed + number)
            )
    for number, split in enumerate(("train", "validation", "test")):
        write_rows(folder / "wikitext2_raw" / f"{split}.parquet", wikitext_rows(6, seed=10 * seed + number))
    return folder


def write_rows(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def task_rows(spec: TaskSpec, count: int, seed: int) -> list[Row]:
    """Learnable rows of a task."""
    draw = random.Random(f"{spec.name} {seed}")
    if spec.name in ("race-middle", "hellaswag"):
        make: Callable[..., Row] = _race if spec.name == "race-middle" else _hellaswag
        return [make(draw, row, seed) for row in range(count)]
    if spec.kind == "span":
        return [_squad(draw, row, seed) for row in range(count)]
    return [_labelled(draw, spec, row) for row in range(count)]


def wikitext_rows(articles: int, seed: int) -> list[Row]:
    """Lines of articles, each starting with a title line."""
    draw = random.Random(f"wikitext {seed}")
    lines = []
    for number in range(articles):
        lines += [" ", f" = {draw.choice(NOUNS).title()} {seed} {number} = ", " "]
        lines += [" ".join(sentence(draw) for _ in range(4)) for _ in range(3)]
    return [{"text": line} for line in lines]


def sentence(draw: random.Random) -> str:
    who, what, where = (draw.choice(NOUNS) for _ in range(3))
    return f"the {who} {draw.choice(VERBS)} the {what} near the {where} ."


def _labelled(draw: random.Random, spec: TaskSpec, row: int) -> Row:
    if spec.kind == "regression":
        label: Any = float(draw.randrange(6))
        words = draw.sample(NOUNS, 5)
        same = words[: int(label)] + draw.sample(VERBS, 5 - int(label))
        return {"sentence1": " ".join(words), "sentence2": " ".join(same), "label": label, "idx": row}
    label = draw.randrange(len(spec.labels))
    texts = {name: sentence(draw) for name in spec.texts}
    texts[spec.texts[-1]] += f" that is {SIGNS[label]} ."
    return {**texts, spec.label: bool(label) if spec.name == "boolq" else label}


def _squad(draw: random.Random, row: int, seed: int) -> Row:
    subjects = draw.sample(NOUNS, 3)
    colours = [draw.choice(COLOURS) for _ in subjects]
    facts = [
        f"The {noun} of town {seed} {row} is {colour}."
        for noun, colour in zip(subjects, colours, strict=True)
    ]
    filler = " ".join(sentence(draw) for _ in range(draw.randrange(1, 6)))
    context = f"{filler} {' '.join(facts)}"
    target = draw.randrange(3)
    start = context.index(facts[target]) + facts[target].rindex(colours[target])
    return {
        "id": f"{seed}-{row}",
        "title": "Town",
        "context": context,
        "question": f"What is the colour of the {subjects[target]}?",
        "answers": {"text": [colours[target]], "answer_start": [start]},
    }


def _hellaswag(draw: random.Random, row: int, seed: int) -> Row:
    label = draw.randrange(4)
    endings = [f"and it is {SIGNS[1] if number == label else SIGNS[0]} ." for number in range(4)]
    return {"ind": row, "ctx": f"{sentence(draw)} {seed} {row}", "endings": endings, "label": label}


def _race(draw: random.Random, row: int, seed: int) -> Row:
    article = row // 2
    story = random.Random(f"article {seed} {article}")
    label = draw.randrange(4)
    questions = ("What is it like?", "One can say that it is   _  .")
    return {
        "example_id": f"middle{seed}{article}.txt",
        "article": f"Story {seed} {article}. {sentence(story)} {sentence(story)}",
        "question": questions[row % 2],
        "options": [SIGNS[1] if number == label else f"{SIGNS[0]} {COLOURS[number]}" for number in range(4)],
        "answer": "ABCD"[label],
    }

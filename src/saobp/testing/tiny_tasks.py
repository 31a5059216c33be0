"""Small made-up tasks in the layout of a data folder, and models and tokenizers to go with them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from saobp.data.tasks import TASKS, TaskSpec
from saobp.data.tokenizers import train_vocabulary
from saobp.transformers.apply import apply

NOUNS = [
    "river",
    "stone",
    "garden",
    "window",
    "letter",
    "doctor",
    "market",
    "bridge",
    "captain",
    "winter",
    "music",
    "horse",
]
VERBS = ["finds", "takes", "leaves", "paints", "carries", "watches", "follows"]
SIGNS = ("bad", "good", "strange")
"""The word that gives a label away."""
COLOURS = ["red", "blue", "green", "brown", "white"]

Row = dict[str, Any]


def write_tasks(folder: Path, rows: Mapping[str, int] | int = 24, seed: int = 0) -> Path:
    """Write every task (and WikiText) below ``folder`` and return it; big training sets are partial ones."""
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
    """Rows of a task that a model can learn."""
    draw = random.Random(f"{spec.name} {seed}")
    if spec.name in ("race-middle", "hellaswag"):
        make: Callable[..., Row] = _race if spec.name == "race-middle" else _hellaswag
        return [make(draw, place, seed) for place in range(count)]
    if spec.kind == "span":
        return [_squad(draw, place, seed) for place in range(count)]
    return [_labelled(draw, spec, place) for place in range(count)]


def wikitext_rows(articles: int, seed: int) -> list[Row]:
    """Lines of articles, each of which opens with a title line."""
    draw = random.Random(f"wikitext {seed}")
    lines = []
    for place in range(articles):
        lines += [" ", f" = {draw.choice(NOUNS).title()} {seed} {place} = ", " "]
        lines += [" ".join(sentence(draw) for _ in range(4)) for _ in range(3)]
    return [{"text": line} for line in lines]


def sentence(draw: random.Random) -> str:
    who, what, where = (draw.choice(NOUNS) for _ in range(3))
    return f"the {who} {draw.choice(VERBS)} the {what} near the {where} ."


def _labelled(draw: random.Random, spec: TaskSpec, place: int) -> Row:
    if spec.kind == "regression":
        label: Any = float(draw.randrange(6))
        words = draw.sample(NOUNS, 5)
        same = words[: int(label)] + draw.sample(VERBS, 5 - int(label))
        return {"sentence1": " ".join(words), "sentence2": " ".join(same), "label": label, "idx": place}
    label = draw.randrange(len(spec.labels))
    texts = {name: sentence(draw) for name in spec.texts}
    texts[spec.texts[-1]] += f" that is {SIGNS[label]} ."
    return {**texts, spec.label: bool(label) if spec.name == "boolq" else label}


def _squad(draw: random.Random, place: int, seed: int) -> Row:
    named = draw.sample(NOUNS, 3)
    colours = [draw.choice(COLOURS) for _ in named]
    facts = [
        f"The {noun} of town {seed} {place} is {colour}." for noun, colour in zip(named, colours, strict=True)
    ]
    filler = " ".join(sentence(draw) for _ in range(draw.randrange(1, 6)))
    context = f"{filler} {' '.join(facts)}"
    asked = draw.randrange(3)
    start = context.index(facts[asked]) + facts[asked].rindex(colours[asked])
    return {
        "id": f"{seed}-{place}",
        "title": "Town",
        "context": context,
        "question": f"What is the colour of the {named[asked]}?",
        "answers": {"text": [colours[asked]], "answer_start": [start]},
    }


def _hellaswag(draw: random.Random, place: int, seed: int) -> Row:
    label = draw.randrange(4)
    endings = [f"and it is {SIGNS[1] if number == label else SIGNS[0]} ." for number in range(4)]
    return {"ind": place, "ctx": f"{sentence(draw)} {seed} {place}", "endings": endings, "label": label}


def _race(draw: random.Random, place: int, seed: int) -> Row:
    article = place // 2
    told = random.Random(f"article {seed} {article}")
    label = draw.randrange(4)
    questions = ("What is it like?", "One can say that it is   _  .")
    return {
        "example_id": f"middle{seed}{article}.txt",
        "article": f"Story {seed} {article}. {sentence(told)} {sentence(told)}",
        "question": questions[place % 2],
        "options": [SIGNS[1] if number == label else f"{SIGNS[0]} {COLOURS[number]}" for number in range(4)],
        "answer": "ABCD"[label],
    }


@functools.cache
def tiny_tokenizer(kind: str = "wordpiece") -> PreTrainedTokenizerFast:
    """A tokenizer that knows the words of the made-up tasks."""
    draw = random.Random(0)
    texts = [sentence(draw) for _ in range(50)]
    texts += [
        " ".join(
            [*SIGNS, *COLOURS, *NOUNS, *VERBS, "What is it like? One can say that Question: Answer: yes no"]
        )
    ]
    return train_vocabulary(texts, size=300, kind=kind)


def save_tiny_bert(
    folder: Path, refinement: str | None = None, *, positions: int = 64, spread: float = 0.02, seed: int = 0
) -> Path:
    """A small masked language model with random weights of a given spread, and its tokenizer."""
    tokenizer = tiny_tokenizer("wordpiece")
    torch.manual_seed(seed)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=positions, pad_token_id=tokenizer.pad_token_id,
            initializer_range=spread,
        )
    )  # fmt: skip
    return _save(model, tokenizer, folder, refinement)


def save_tiny_gpt2(folder: Path, refinement: str | None = None, *, seed: int = 0) -> Path:
    """A small decoder with random weights, large enough to tell candidates apart, and its tokenizer."""
    tokenizer = tiny_tokenizer("bpe")
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64,
            bos_token_id=end, eos_token_id=end, initializer_range=0.2,
        )
    )  # fmt: skip
    return _save(model, tokenizer, folder, refinement)


def _save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path, refinement: str | None) -> Path:
    if refinement is not None:
        apply(model, refinement)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

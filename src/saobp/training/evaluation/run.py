"""Measure a saved language model: WikiText, BLiMP, and zero-shot questions of a decoder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from saobp.data.tasks import TASKS, Split, load_split
from saobp.refinement import Refinement
from saobp.runs.folder import RunFolder
from saobp.storage.model_folders import intact_folder
from saobp.training.checkpoints import config_of, load_model, load_tokenizer_of, model_checksum, model_name
from saobp.training.evaluation.blimp import accuracies, judge_pairs, read_blimp, save_items
from saobp.training.evaluation.harness import harness_accuracy, require_harness
from saobp.training.evaluation.perplexity import (
    POSITIONS,
    WikiText,
    causal_perplexity,
    masked_perplexity,
    pseudo_perplexity,
    read_wikitext,
)
from saobp.training.evaluation.zero_shot import accuracy, boolq_questions, positions_of, race_questions

MEASURED = ("wikitext", "race-middle", "boolq")
"""Default tasks: all but BLiMP, which takes long."""
KNOWN = (*MEASURED, "blimp")
SPLITS = {"race-middle": "test", "boolq": "validation"}
"""Splits as in lm-evaluation-harness."""
BLOCK = 128
"""Tokens in a block for an encoder, as in pretraining."""

Advance = Callable[[str, int, int], None]


def evaluate(
    model: str | Path,
    tasks: Sequence[str] = MEASURED,
    *,
    data_dir: str | Path | None = None,
    folder: str | Path | None = None,
    refinement: Refinement | str | None = None,
    harness: bool = False,
    positions: int | None = POSITIONS,
    length: int | None = None,
    limit: int | None = None,
    advance: Advance | None = None,
) -> dict[str, Any]:
    """Results by task. With ``folder`` they are saved there as a run of kind ``evaluate``.

    tasks:   names; of the default ones, or of all, an encoder is asked those that it can answer
    harness: also run lm-evaluation-harness and report its number too
    positions: how many positions pseudo-perplexity masks; None masks all
    length:    tokens of a block or window; by default 128 for an encoder, all positions of a decoder
    limit: at most so many rows of a task, or documents of WikiText
    """
    unknown = [task for task in tasks if task not in KNOWN]
    if unknown:
        raise ValueError(f"unknown task {unknown[0]!r}: choose from {', '.join(KNOWN)}")
    if harness:
        require_harness()
    override = None if refinement is None else Refinement.of(refinement)
    loaded, tokenizer, is_decoder = load_language_model(model, override)
    if not is_decoder:
        if tuple(tasks) in (MEASURED, KNOWN):
            tasks = [task for task in tasks if task not in SPLITS]
        elif any(task in SPLITS for task in tasks):
            raise ValueError(
                "race-middle and boolq are asked of a decoder; this model is an encoder: try wikitext, blimp"
            )
    splits = {
        task: _shortened(load_split(TASKS[task], SPLITS[task], data_dir), limit)
        for task in tasks
        if task in SPLITS
    }
    if "blimp" in tasks:
        splits["blimp"] = read_blimp(data_dir).sample(limit)
    room = positions_of(loaded)
    if length is not None and length > room:
        raise ValueError(f"length {length} does not fit into the model's {room} positions")
    text = read_wikitext(tokenizer, data_dir, documents=limit) if "wikitext" in tasks else None
    kept = getattr(loaded.config, "saobp", None)
    recipe = {
        "model": model_name(model), "tasks": list(tasks), "refinement": kept, "positions": positions,
        "length": length, "limit": limit, "harness": harness,
    }  # fmt: skip
    data = {"model": model_checksum(model), **{task: split.checksum for task, split in splits.items()}}
    if text is not None:
        data["wikitext"] = text.checksum
    run = (
        None
        if folder is None
        else RunFolder.start(folder, "evaluate", recipe, seed=0, data=data, resume=True)
    )
    began = time.monotonic()
    results: dict[str, Any] = {
        "model": model_name(model),
        "decoder": is_decoder,
        "notes": notes_of(loaded, splits, limit),
    }
    try:
        for task in tasks:

            def advance_task(done: int, total: int, task: str = task) -> None:
                if advance is not None:
                    advance(task, done, total)

            if task == "blimp":
                items = judge_pairs(
                    loaded, tokenizer, splits[task], is_decoder=is_decoder, advance=advance_task
                )
                results[task] = accuracies(items)
                if harness and is_decoder:
                    results[task]["harness"] = harness_accuracy(loaded, tokenizer, task, splits[task])
                if run is not None:
                    save_items(items, run.path)
            elif task in splits:
                results[task] = _questions(loaded, tokenizer, task, splits[task], harness, advance_task)
            elif text is not None:
                results[task] = _wikitext(
                    loaded, tokenizer, is_decoder, text, positions, length, advance_task
                )
    except BaseException as problem:
        if run is not None:
            run.fail(time.monotonic() - began, problem)
        raise
    if run is not None:
        run.finish(results, seconds=time.monotonic() - began)
    return results


def load_language_model(
    folder: str | Path, refinement: Refinement | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, bool]:
    """A saved language model in float32, on a GPU if there is one; its tokenizer; whether it is a decoder."""
    intact_folder(folder)
    kinds = config_of(folder).architectures or ["none"]
    is_decoder = kinds[0].endswith(("LMHeadModel", "ForCausalLM"))
    if not is_decoder and not kinds[0].endswith("ForMaskedLM"):
        raise ValueError(
            f"{str(folder)!r} holds {kinds[0]}, which is no language model: give a pretrained one"
        )
    kind = AutoModelForCausalLM if is_decoder else AutoModelForMaskedLM
    model = load_model(folder, kind, refinement, head_may_be_new=False)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), load_tokenizer_of(folder), is_decoder


def _shortened(split: Split, limit: int | None) -> Split:
    """At most ``limit`` rows, or whole articles where rows belong to one."""
    if limit is None or "article" not in split.table.column_names:
        return split.sample(limit)
    articles = split.column("article")
    kept = set(list(dict.fromkeys(articles))[:limit])
    return split.take(np.flatnonzero([article in kept for article in articles]))


def notes_of(model: PreTrainedModel, splits: dict[str, Split], limit: int | None) -> list[str]:
    """Caveats that go with the numbers."""
    notes = [f"{name}: {split.note}" for name, split in splits.items() if split.note]
    if limit is not None:
        notes.append(f"only {limit} rows or documents are used")
    written = getattr(model.config, "saobp", None)
    if written and written.get("future") == "paper":
        notes.append(
            "future='paper' sees the tokens it has to predict: these numbers mean nothing beside others"
        )
    return notes


def _wikitext(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    is_decoder: bool,
    text: WikiText,
    positions: int | None,
    length: int | None,
    advance: Callable[[int, int], None],
) -> dict[str, Any]:
    room = positions_of(model)
    common = {"split": "test", "checksum": text.checksum}
    if is_decoder:
        found = causal_perplexity(model, text.row, length=room if length is None else length, advance=advance)
        by_word = math.exp(min(found.pop("nats") / text.words, 700))
        return {**found, "word_perplexity": by_word, "words": text.words, **common}
    blocks = text.blocks(tokenizer, min(room, BLOCK) if length is None else length)
    return {
        "pseudo": pseudo_perplexity(model, tokenizer, blocks, positions=positions, advance=advance),
        "masked": masked_perplexity(model, tokenizer, blocks),
        "length": blocks.shape[1],
        "blocks": len(blocks),
        **common,
    }


def _questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    split: Split,
    harness: bool,
    advance: Callable[[int, int], None],
) -> dict[str, Any]:
    if task == "boolq":
        found = accuracy(model, tokenizer, boolq_questions(split), advance=advance)
    else:
        found = accuracy(model, tokenizer, race_questions(split), advance=advance)
        found["every_question"] = accuracy(
            model, tokenizer, race_questions(split, every=True), advance=advance
        )
    if harness:
        found["harness"] = harness_accuracy(model, tokenizer, task, split)
        if task == "race-middle":
            every = harness_accuracy(model, tokenizer, task, split, every=True)
            found["every_question"]["harness"] = every
    return {**found, "split": split.name}

"""Measure a saved language model: WikiText, BLiMP, and zero-shot questions of a decoder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
    Advance,
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
    advance: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Results by task. With ``folder`` they are saved there as a run of kind ``evaluate``.

    tasks:   names; of the default ones, or of all, an encoder is asked those that it can answer
    harness: also run lm-evaluation-harness and report its number too
    positions: how many positions pseudo-perplexity masks; None masks all
    length:    tokens of a block or window; by default 128 for an encoder, all positions of a decoder
    limit: at most so many rows of a task, or documents of WikiText
    advance: called with a task, and how many of how many items are done
    """
    unknown = [task for task in tasks if task not in KNOWN]
    if unknown:
        raise ValueError(f"unknown task {unknown[0]!r}: choose from {', '.join(KNOWN)}")
    if harness:
        require_harness()
    evaluation = Evaluation.of(
        model, tasks, None if refinement is None else Refinement.of(refinement), data_dir,
        harness=harness, positions=positions, length=length, limit=limit,
    )  # fmt: skip
    recipe = {
        "model": model_name(model), "tasks": list(evaluation.tasks),
        "refinement": getattr(evaluation.model.config, "saobp", None), "positions": positions,
        "length": length, "limit": limit, "harness": harness,
    }  # fmt: skip
    data = {"model": model_checksum(model), **evaluation.checksums()}
    run = None
    if folder is not None:
        run = RunFolder.start(folder, "evaluate", recipe, seed=0, data=data, resume=True)
    began = time.monotonic()
    results: dict[str, Any] = {
        "model": model_name(model),
        "decoder": evaluation.is_decoder,
        "notes": notes_of(evaluation.model, evaluation.splits, limit),
    }
    try:
        for task in evaluation.tasks:
            progress = None if advance is None else partial(advance, task)
            results[task] = evaluation.measure(task, progress, None if run is None else run.path)
    except BaseException as problem:
        if run is not None:
            run.fail(time.monotonic() - began, problem)
        raise
    if run is not None:
        run.finish(results, seconds=time.monotonic() - began)
    return results


@dataclass(frozen=True)
class Evaluation:
    """A loaded model and the texts of its tasks; options as those of :func:`evaluate`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    is_decoder: bool
    tasks: tuple[str, ...]
    splits: dict[str, Split]
    text: WikiText | None
    harness: bool
    positions: int | None
    length: int | None

    @classmethod
    def of(
        cls, folder: str | Path, tasks: Sequence[str], refinement: Refinement | None,
        data_dir: str | Path | None, *, harness: bool, positions: int | None, length: int | None,
        limit: int | None,
    ) -> Evaluation:  # fmt: skip
        model, tokenizer, is_decoder = load_language_model(folder, refinement)
        tasks = tasks_for(tasks, is_decoder)
        splits = {
            task: _shortened(load_split(TASKS[task], SPLITS[task], data_dir), limit)
            for task in tasks
            if task in SPLITS
        }
        if "blimp" in tasks:
            splits["blimp"] = read_blimp(data_dir).sample(limit)
        max_length = positions_of(model)
        if length is not None and length > max_length:
            raise ValueError(f"length {length} does not fit into the model's {max_length} positions")
        text = read_wikitext(tokenizer, data_dir, documents=limit) if "wikitext" in tasks else None
        return cls(model, tokenizer, is_decoder, tasks, splits, text, harness, positions, length)

    def checksums(self) -> dict[str, str]:
        """Of the texts."""
        texts = {task: split.checksum for task, split in self.splits.items()}
        return texts if self.text is None else {**texts, "wikitext": self.text.checksum}

    def measure(self, task: str, advance: Advance | None, folder: Path | None) -> dict[str, Any]:
        """The result of one task. BLiMP's items are saved in ``folder``."""
        if task == "wikitext":
            return self._perplexity(advance)
        if task == "blimp":
            return self._pairs(advance, folder)
        return self._questions(task, advance)

    def _perplexity(self, advance: Advance | None) -> dict[str, Any]:
        assert self.text is not None
        max_length = positions_of(self.model)
        common = {"split": "test", "checksum": self.text.checksum}
        if self.is_decoder:
            length = max_length if self.length is None else self.length
            result = causal_perplexity(self.model, self.text.row, length=length, advance=advance)
            by_word = math.exp(min(result.pop("nats") / self.text.words, 700))
            return {**result, "word_perplexity": by_word, "words": self.text.words, **common}
        length = min(max_length, BLOCK) if self.length is None else self.length
        blocks = self.text.blocks(self.tokenizer, length)
        call = self.model, self.tokenizer, blocks
        return {
            "pseudo": pseudo_perplexity(*call, positions=self.positions, advance=advance),
            "masked": masked_perplexity(*call),
            "length": blocks.shape[1],
            "blocks": len(blocks),
            **common,
        }

    def _pairs(self, advance: Advance | None, folder: Path | None) -> dict[str, Any]:
        split = self.splits["blimp"]
        items = judge_pairs(self.model, self.tokenizer, split, is_decoder=self.is_decoder, advance=advance)
        result = accuracies(items)
        if self.harness and self.is_decoder:
            result["harness"] = harness_accuracy(self.model, self.tokenizer, "blimp", split)
        if folder is not None:
            save_items(items, folder)
        return result

    def _questions(self, task: str, advance: Advance | None) -> dict[str, Any]:
        loaded, split = (self.model, self.tokenizer), self.splits[task]
        if task == "boolq":
            result = accuracy(*loaded, boolq_questions(split), advance=advance)
        else:
            result = accuracy(*loaded, race_questions(split), advance=advance)
            result["every_question"] = accuracy(*loaded, race_questions(split, every=True), advance=advance)
        if self.harness:
            result["harness"] = harness_accuracy(*loaded, task, split)
            if task == "race-middle":
                every = harness_accuracy(*loaded, task, split, every=True)
                result["every_question"]["harness"] = every
        return {**result, "split": split.name}


def tasks_for(tasks: Sequence[str], is_decoder: bool) -> tuple[str, ...]:
    """Those that a model can do; raises if an encoder was asked by name what only decoders can do."""
    if is_decoder:
        return tuple(tasks)
    if tuple(tasks) not in (MEASURED, KNOWN) and any(task in SPLITS for task in tasks):
        raise ValueError(
            "race-middle and boolq are asked of a decoder; this model is an encoder: try wikitext, blimp"
        )
    return tuple(task for task in tasks if task not in SPLITS)


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
    first_articles = set(list(dict.fromkeys(articles))[:limit])
    return split.take(np.flatnonzero([article in first_articles for article in articles]))


def notes_of(model: PreTrainedModel, splits: dict[str, Split], limit: int | None) -> list[str]:
    """Caveats that go with the numbers."""
    notes = [f"{name}: {split.note}" for name, split in splits.items() if split.note]
    if limit is not None:
        notes.append(f"only {limit} examples or documents are used")
    written = getattr(model.config, "saobp", None)
    if written and written.get("future") == "paper":
        notes.append(
            "future='paper' sees the tokens it has to predict: these numbers mean nothing beside others"
        )
    return notes

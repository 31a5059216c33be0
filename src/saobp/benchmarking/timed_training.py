"""Trainers that take steps when they are timed: Transformers' own and this project's, on made-up texts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from saobp.data.blocks import Blocks
from saobp.data.token_store import DOCUMENTS, FORMAT, TOKENS, StoreMetadata, TokenStore
from saobp.data.tokenizers import prefix_of
from saobp.refinement import Refinement
from saobp.runs.folder import RunFolder
from saobp.training.compiled_step import loss_as_forward
from saobp.training.objectives import objective_of
from saobp.training.pretrain import new_model
from saobp.training.recipes import PretrainRecipe
from saobp.training.trainer import PretrainTrainer, arguments

VERSIONS = ("transformers", "transformers-0", "plain", "high", "plain-0.1", "high-0.1")
"""``transformers`` has its config's dropout of 0.1, ``-0`` none; ours have none unless ``-0.1``."""
WARM_UP, PROFILED = 8, 30
"""Steps before timing, and steps of a trace of GPU kernels."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>")


class RandomBlocks(Dataset):
    """Random tokens ``[rows, length]``, row by row as lists, as Transformers' collator expects."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        random = np.random.default_rng(0)
        self.tokens = random.integers(len(SPECIAL), vocabulary, (rows, length), dtype=np.uint16)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.tokens[index].tolist()}


def made_up_texts(folder: Path, tokenizer: PreTrainedTokenizerFast, recipe: PretrainRecipe) -> Blocks:
    """Random tokens in three corpora of uneven documents, mapped from files and mixed as in a real run."""
    random = np.random.default_rng(0)
    stores = {}
    for corpus in ("one", "two", "three"):
        store = folder / corpus
        store.mkdir(parents=True)
        sizes = 1 + random.geometric(1 / 400, 4 * recipe.batch_size)
        documents = np.concatenate([[0], np.cumsum(sizes)])
        tokens = random.integers(len(SPECIAL), len(tokenizer), documents[-1], dtype=np.uint16)
        tokens.tofile(store / TOKENS)
        np.save(store / DOCUMENTS, documents)
        description = StoreMetadata(
            FORMAT, "<u2", len(tokens), len(sizes), len(tokenizer), 0, "", corpus, "", "", ""
        )
        stores[corpus] = TokenStore(store, description)
    return Blocks(stores, length=recipe.length, seed=recipe.seed, prefix=prefix_of(tokenizer))


def made_up_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """As many tokens as asked for, with the special ones first; speed does not depend on which words."""
    words = [*SPECIAL, *(f"w{number}" for number in range(vocabulary - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )


class Stopwatch(TrainerCallback):
    """Time from the end of the warm-up to the end of training; optionally traces GPU kernels."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.start = 0, 0.0, 0.0
        self.profiler: Any = None
        self.trace = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == WARM_UP:
            synchronize()
            if self.trace:
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self.profiler.start()
            self.start = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        synchronize()
        self.seconds = time.perf_counter() - self.start
        self.steps = state.global_step - WARM_UP
        if self.trace:
            self.profiler.stop()


@dataclass
class TimedTrainer:
    """A trainer that can be run repeatedly for some steps."""

    trainer: Trainer
    watch: Stopwatch

    def milliseconds(self, steps: int) -> float:
        """Milliseconds of a step: the mean of ``steps`` after a warm-up."""
        self.trainer.args.max_steps = WARM_UP + steps
        self.trainer.train()
        return self.watch.seconds * 1000 / self.watch.steps

    def trace(self, steps: int = PROFILED) -> Trace:
        """Trace GPU kernels in separate steps: tracing slows launches down."""
        self.watch.trace = True
        try:
            self.milliseconds(steps)
        finally:
            self.watch.trace = False
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in self.watch.profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
        ]
        return Trace.of(spans, steps)


@contextmanager
def timed_trainer(
    version: str, recipe: PretrainRecipe, vocabulary: int, compiled: bool
) -> Iterator[TimedTrainer]:
    """A trainer of a version, ready to run; ours has a temporary run folder."""
    tokenizer = made_up_tokenizer(vocabulary)
    watch = Stopwatch()
    name, _, dropout = version.partition("-")
    with tempfile.TemporaryDirectory() as folder:
        if name == "transformers":
            recipe = replace(recipe, dropout=float(dropout or 0.1))
            rows = RandomBlocks(64 * recipe.batch_size, recipe.length, vocabulary)
            trainer = _their_trainer(recipe, tokenizer, rows, Path(folder), compiled)
            trainer.add_callback(watch)
            yield TimedTrainer(trainer, watch)
            return
        recipe = replace(
            recipe,
            dropout=float(dropout or recipe.dropout),
            compiled=compiled,
            refinement=Refinement("high", 0.2 if recipe.size == "tiny" else "auto")
            if name == "high"
            else None,
        )
        model = new_model(recipe, tokenizer)
        args = arguments(recipe, Path(folder), "none")
        objective = objective_of(recipe.family, tokenizer, recipe.masked_share)
        texts = made_up_texts(Path(folder, "texts"), tokenizer, recipe)
        inner = PretrainTrainer(
            model,
            args,
            recipe,
            RunFolder(folder),
            train=texts,
            validation=None,
            callbacks=[watch],
            notify=print,
        )
        with loss_as_forward(model, objective, precision=recipe.precision, compiled=compiled):
            yield TimedTrainer(inner, watch)


def _their_trainer(
    recipe: PretrainRecipe,
    tokenizer: PreTrainedTokenizerFast,
    rows: RandomBlocks,
    folder: Path,
    compiled: bool,
) -> Trainer:
    """Transformers' Trainer: labels at all positions, masks by a collator in workers, SDPA, autocast."""
    cuda = torch.cuda.is_available()
    model = new_model(replace(recipe, refinement=None, vocabulary_multiple=1), tokenizer)
    model.set_attn_implementation("sdpa")
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        max_steps=1,
        max_grad_norm=recipe.clip,
        bf16=cuda,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        torch_compile=compiled,
        logging_steps=recipe.log_steps,
        logging_nan_inf_filter=False,
        save_strategy="no",
        dataloader_num_workers=min(12, max(0, (os.cpu_count() or 1) - 2)) if cuda else 0,
        dataloader_drop_last=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not cuda,
    )
    masked = recipe.family == "bert"
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=masked, mlm_probability=recipe.masked_share)
    trainer = Trainer(model, args, data_collator=collator, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    return trainer


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


LONG = 5.0
"""Microseconds; in a longer gap between kernels the GPU is idle."""

Span = tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """Kernels, copies and fills of some steps: their number and milliseconds a step, and long gaps."""

    kernels: float
    milliseconds: float
    waiting: float
    """Share of the traced time in gaps longer than ``LONG``."""

    @classmethod
    def of(cls, spans: Sequence[Span], steps: int) -> Trace:
        """From spans in microseconds."""
        merged = union(spans)
        busy = sum(end - start for start, end in merged)
        gaps = [later[0] - earlier[1] for earlier, later in pairwise(merged)]
        whole = merged[-1][1] - merged[0][0] if merged else 0.0
        long = sum(gap for gap in gaps if gap > LONG)
        return cls(len(spans) / steps, busy / 1000 / steps, long / whole if whole else 0.0)

    def idle_share(self, milliseconds: float) -> float:
        """Share of an untraced step of so many milliseconds in which no kernel runs."""
        return max(0.0, 1 - self.milliseconds / milliseconds)


def union(spans: Iterable[Span]) -> list[Span]:
    """Sorted spans, overlapping or adjacent ones merged."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged

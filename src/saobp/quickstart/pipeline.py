"""The whole pipeline in miniature: a plain and a refined run on some paragraphs, and a diagnosis of both."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerFast

from saobp.data import (
    Blocks,
    Documents,
    held_out_documents,
    open_corpus,
    prefix_of,
    prepare_tokens,
    train_vocabulary,
)
from saobp.data.token_store import Progress
from saobp.metrics.diagnosis.diagnose import Diagnosis
from saobp.metrics.diagnosis.head_names import TITLES
from saobp.metrics.diagnosis.loading import load_model
from saobp.refinement import Refinement
from saobp.report import PageTable, explorer_data, read_runs, write_explorer, write_report
from saobp.training.objectives import objective_of, row_seeds
from saobp.training.pretrain import Result, new_model
from saobp.training.recipes import PretrainRecipe, tiny, with_steps

VOCABULARY = 1024
HELD_OUT = 0.05
FEWEST_STEPS = 40
TRIAL_SECONDS = 2.0
"""Duration of the trial run that measures the speed of this machine."""
STATISTICS = ("gtd", "indirect_entropy", "attention_entropy", "sink_mass")
SENTENCES = 3
FEWEST_TOKENS, MOST_TOKENS = 12, 20
TITLE = "saobp quickstart: the same model trained plain and with {}"


@dataclass(frozen=True)
class QuickstartTexts:
    """Data of both runs: tokenizer, packed tokens, and the held-out paragraphs."""

    tokenizer: PreTrainedTokenizerFast
    train: Blocks
    validation: Blocks
    held_out: list[str]
    characters: int


def prepare(texts: Sequence[str], folder: Path, length: int, progress: Progress) -> QuickstartTexts:
    """Paragraphs as a corpus of one parquet file, a vocabulary learned from it, and its tokens."""
    folder.mkdir(parents=True)
    file = folder / "python.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), file)
    corpus = open_corpus(file)
    tokenizer = train_vocabulary(
        Documents((corpus,)), VOCABULARY, progress=lambda done, total: progress(done, 2 * total)
    )
    store = prepare_tokens(
        corpus,
        tokenizer,
        folder / "tokens",
        processes=1,
        progress=lambda done, total: progress(total + done, 2 * total),
    )
    train, validation = (
        Blocks({"python": store}, length=length, split=split, held_out=HELD_OUT, prefix=prefix_of(tokenizer))
        for split in ("train", "validation")
    )
    held_out = [texts[index] for index in held_out_documents(store, HELD_OUT)]
    return QuickstartTexts(tokenizer, train, validation, held_out, sum(map(len, texts)))


def recipe_of(steps: int) -> PretrainRecipe:
    """ModernBERT, 3 layers of 4 heads, 96 wide: within a minute it learns more than unigram frequencies.

    BERT of the same size, with post-norm and learned positions, does not.
    """
    base = replace(
        tiny("modernbert", "micro"),
        name="quickstart",
        batch_size=32,
        length=32,
        learning_rate=4e-3,
        weight_decay=0.01,
        evaluation_rows=256,
        health_texts=32,
        seed=0,
        corpus="Python's documentation",
    )
    base = replace(base, steps=1000, warmup_steps=50, evaluation_steps=100, checkpoint_steps=1000)
    return with_steps(base, steps)


def fitting_steps(recipe: PretrainRecipe, texts: QuickstartTexts, seconds: float) -> int:
    """The recipe's steps, or fewer if this machine is too slow."""
    model = new_model(recipe, texts.tokenizer)
    objective = objective_of(recipe.family, texts.tokenizer, recipe.masked_share)
    ids = texts.train.at(range(recipe.batch_size))["input_ids"]
    seeds = torch.from_numpy(row_seeds(0, 0, range(len(ids))))
    durations: list[float] = []
    while len(durations) < 4 or sum(durations) < TRIAL_SECONDS:
        start = time.perf_counter()
        objective(model, ids, seeds, recipe.precision).backward()
        durations.append(time.perf_counter() - start)
    return max(FEWEST_STEPS, min(recipe.steps, int(seconds / (1.2 * min(durations)))))


def choose_sentences(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], own: str | None = None
) -> list[str]:
    """The user's own, or short sentences with the fewest tokens per word."""
    if own is not None:
        if not tokenizer(own, add_special_tokens=False)["input_ids"]:
            raise ValueError("the sentence holds no word: give one to draw")
        return [own]
    sentences = [one for text in texts for one in re.findall(r"[A-Z][a-z][^.?!]+\.(?=\s|$)", text)]
    sizes = [len(one) for one in tokenizer.backend_tokenizer.encode_batch(sentences)]
    fitting = sorted(
        (size / len(one.split()), one)
        for one, size in zip(sentences, sizes, strict=True)
        if FEWEST_TOKENS <= size <= MOST_TOKENS
    )
    return [one for _, one in fitting[:SENTENCES]] or [texts[0][:100]]


def diagnose_runs(runs: dict[str, Path], sentences: Sequence[str], progress: Progress) -> list[Diagnosis]:
    """The heads of each run as training measured them last, on held-out rows; writes its explorer data."""
    diagnoses = []
    for index, (name, folder) in enumerate(runs.items(), 1):
        model, tokenizer = load_model(str(folder / "model"))
        write_explorer(explorer_data(model, tokenizer, sentences, subject=name), folder)
        (run,) = read_runs([folder])
        diagnoses.append(run.health[-1].diagnosis(name))
        progress(index, len(runs))
    return diagnoses


def numbers(results: dict[str, Result], diagnoses: Sequence[Diagnosis]) -> list[tuple[str, list[float]]]:
    """Rows of name and value per run: means over heads on held-out text, and the held-out loss."""
    rows: list[tuple[str, list[float]]] = [
        ("held-out loss of masked tokens (nats)", [result.eval_loss or 0.0 for result in results.values()]),
        ("held-out perplexity", [result.eval_perplexity or 0.0 for result in results.values()]),
    ]
    for name in STATISTICS:
        means = [
            sum(head.values[name] for head in diagnosis.heads) / len(diagnosis.heads)
            for diagnosis in diagnoses
        ]
        rows.append((TITLES[name], means))
    return rows


def write_page(
    runs: dict[str, Path],
    results: dict[str, Result],
    diagnoses: Sequence[Diagnosis],
    texts: QuickstartTexts,
    refinement: Refinement,
    sentence: str,
    out: Path,
) -> Path:
    """The page of both runs: numbers first, then curves, heads and attention maps."""
    result = next(iter(results.values()))
    table = PageTable(
        "Both runs on held-out text",
        ["", *runs],
        [[name, *(f"{value:.3f}" for value in values)] for name, values in numbers(results, diagnoses)],
        f"A ModernBERT of {result.parameters:,} parameters, trained twice from the same start on the same "
        f"tokens in the same order ({result.steps:,} steps, {result.tokens:,} tokens of "
        f"{texts.characters:,} characters of Python's own documentation), once plain and once with its "
        "attention refined all along. Means over heads, on held-out sequences. One seed and a minute of "
        "training: a look at the instruments, not evidence for or against the method.",
    )
    title = TITLE.format(refinement)
    return write_report(list(runs.values()), out, title=title, tables=[table], sample=sentence)

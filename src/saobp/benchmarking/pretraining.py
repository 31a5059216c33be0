"""Tokens per second of pretraining against plain Transformers, interleaved in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from saobp.benchmarking.table import BenchmarkTable, Cell
from saobp.benchmarking.timed_training import LONG, PROFILED, WARM_UP, TimedTrainer, timed_trainer
from saobp.runs.machine import machine
from saobp.sizes import PAPER_SIZES
from saobp.timing import Failure, Timing
from saobp.training.recipes import PretrainRecipe, fast, paper, tiny

MODELS = ("bert-mini", "bert-small", "bert-medium", "gpt2-mini")
VOCABULARIES = {"bert": 30522, "gpt2": 50257}


def checked_model(name: str) -> str:
    """The name of a model to time, if it can be: ``FAMILY-SIZE``, or ``FAMILY-SIZE@ROWS``."""
    model, at, rows = name.partition("@")
    family, _, size = model.partition("-")
    if family not in VOCABULARIES or size not in ("tiny", *PAPER_SIZES):
        raise ValueError(f"there is no model {model!r} to time: choose such as {', '.join(MODELS)}")
    if at and (not rows.isdecimal() or int(rows) == 0 or size == "tiny"):
        raise ValueError(f"{name!r} is no model at a batch size: write such as bert-mini@32")
    return name


def pretraining_speed(
    *,
    names: Sequence[str],
    versions: Sequence[str],
    compiled: bool = True,
    turns: int = 5,
    seconds: float = 2.0,
    limit: float,
    traced: bool = True,
    notify: Callable[[str], object] = print,
    save: Callable[[BenchmarkTable], object],
) -> BenchmarkTable:
    """One row per model: million tokens per second of every version, ratios, and idle times of ours.

    names: such as ``bert-mini``, by the recipe fast, or ``bert-mini@32``, by the recipe paper at 32 rows
    A turn of a version takes about ``seconds``; no model is begun after ``limit`` seconds.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    table = BenchmarkTable("pretraining", "Pretraining: million tokens per second", machine(device))
    table.notes.append(
        f"Medians of {turns} turns in which every version trains once for about {seconds:g} s after "
        f"{WARM_UP} steps of warm-up; ratios are medians over turns. transformers: Trainer with "
        "torch_compile, SDPA, bfloat16 autocast, fused AdamW, labels at all positions, masks from its "
        "collator in worker processes, dropout 0.1; transformers-0: the same without dropout. plain, high: "
        "the recipe of this project (head at predicted positions only, bfloat16 copies of the weights, "
        "vocabulary rounded up to a multiple of 64, masks drawn on the device, no dropout unless the name "
        "says so; rows gathered from three token stores, as in a real run). "
        "model@rows: the recipe paper (dropout 0.1, the vocabulary as it is) with batches of so many rows. "
        f"kernels: of a step, with copies and fills, in {PROFILED} traced steps. idle %: share of a step in "
        "which none of them runs, by their traced time in an untraced step; it is mostly the short gaps "
        f"between neighbours. waiting %: gaps over {LONG:g} microseconds in the trace, where the GPU waits "
        "for the program; tracing makes them longer, so this is an upper bound."
    )
    start = time.monotonic()
    for name in names:
        if time.monotonic() - start > limit:
            table.notes.append(f"{name}: left out, because {limit:g} seconds had passed.")
        else:
            table.rows.append(_row(name, versions, compiled, turns, seconds, traced, notify))
        save(table)
    return table


def _row(
    name: str,
    versions: Sequence[str],
    compiled: bool,
    turns: int,
    seconds: float,
    traced: bool,
    notify: Callable[[str], object],
) -> dict[str, Cell]:
    recipe = _recipe(name)
    vocabulary = 300 if recipe.size == "tiny" else VOCABULARIES[recipe.family]
    torch._dynamo.reset()
    with ExitStack() as stack:
        ready: dict[str, TimedTrainer] = {}
        failed: dict[str, Failure] = {}
        steps: dict[str, int] = {}
        for version in versions:
            began = time.monotonic()
            try:
                entered = stack.enter_context(timed_trainer(version, recipe, vocabulary, compiled))
                entered.milliseconds(2)
                steps[version] = max(2, round(seconds * 1000 / entered.milliseconds(5)))
                ready[version] = entered
            except Exception as error:
                failed[version] = Failure.of(error)
            notify(f"{name}, {version}: ready after {time.monotonic() - began:.0f} s")
        found: dict[str, list[float]] = {version: [] for version in ready}
        for _ in range(turns):
            for version, entered in ready.items():
                found[version].append(entered.milliseconds(steps[version]))
        timings = {version: Timing(tuple(times)) for version, times in found.items()}
        cells: dict[str, Cell] = {"model": name, "batch": f"{recipe.batch_size} x {recipe.length}"}
        for version in versions:
            cells[version] = (
                recipe.tokens_per_step / timings[version].median / 1000
                if version in timings
                else failed[version].reason
            )
        ours = [version for version in timings if not version.startswith("transformers")]
        for version in ours:
            for other in ("transformers", "transformers-0"):
                if other in timings:
                    cells[f"{version} / {other}"] = timings[other].over(timings[version])
            cells[f"{version} steps/s"] = 1000 / timings[version].median
        if torch.cuda.is_available() and traced:
            for version in ours:
                kernels = ready[version].trace()
                cells[f"{version} kernels"] = round(kernels.kernels)
                cells[f"{version} idle %"] = 100 * kernels.idle_share(timings[version].median)
                cells[f"{version} waiting %"] = 100 * kernels.waiting
        notify(f"{name}: {cells}")
        return cells


def _recipe(name: str) -> PretrainRecipe:
    """The recipe of a model by its name, without evaluations and checkpoints."""
    model, _, rows = name.partition("@")
    family, _, size = model.partition("-")
    recipe = tiny(family, size) if size == "tiny" else fast(family, size)
    if rows:
        recipe = replace(paper(family, size), batch_size=int(rows))
    return replace(recipe, evaluation_rows=0, log_steps=50, evaluation_steps=10**6, checkpoint_steps=10**6)

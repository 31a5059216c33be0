"""The compute stages: pretraining, fine-tuning, measurements. Existing results are reused."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

from saobp.data.tasks import Task, load_task
from saobp.lab.experiment_plan import FinetuneRun, Measurement, PretrainRun, check_same
from saobp.lab.measurements import take_measurement
from saobp.lab.scales import Scale
from saobp.lab.work_queue import Notify, StageResult, WorkItem, work_through
from saobp.runs.folder import RunFolder
from saobp.runs.machine import command_line, commit, environment
from saobp.storage.json_files import write_json
from saobp.training.compiled_step import free_memory
from saobp.training.dataset import PretrainingData, find_pretraining_data
from saobp.training.finetune import finetune, recipe_for
from saobp.training.pretrain import pretrain
from saobp.training.recipes import PretrainRecipe


@dataclass(frozen=True)
class DataSources:
    """The folders of an invocation."""

    scale: Scale
    tokens: Path
    data_dir: Path | None = None

    def texts(self, recipe: PretrainRecipe) -> PretrainingData:
        """Rows for one run; runs of one family and corpus share them, each in the order of its seed."""
        texts = _texts(self, recipe.family, recipe.corpus, recipe.length)
        return replace(texts, train=texts.train.with_seed(recipe.seed))


@lru_cache(maxsize=4)
def _texts(sources: DataSources, family: str, corpus: str, length: int) -> PretrainingData:
    """Cached for all seeds, since verifying a token store reads every token."""
    return find_pretraining_data(
        family,
        corpus,
        length=length,
        seed=0,
        tokens=sources.tokens,
        data_dir=sources.data_dir,
        vocabulary=sources.scale.vocabulary,
        held_out=0.01 if sources.scale.vocabulary is None else 0.1,
    )


Work = TypeVar("Work", FinetuneRun, Measurement)
NAMED = 3
"""Missing models listed in a message; the rest are counted."""


def pretrain_all(
    models: Sequence[PretrainRun],
    runs: Path,
    sources: DataSources,
    notify: Notify = print,
    progress: Notify = print,
) -> StageResult:
    """Train unfinished runs one by one in this process, so that code is compiled once."""

    def item(model: PretrainRun) -> WorkItem:
        run = RunFolder(model.folder(runs))

        def is_done() -> bool:
            if run.is_finished:
                check_same(run, model.recipe)
                run.clean_up()
            return run.is_finished

        return WorkItem(model.name, is_done, lambda: progress(_pretrain(model, run, sources, notify)))

    return work_through([item(model) for model in models], runs, notify, progress)


def _pretrain(model: PretrainRun, run: RunFolder, sources: DataSources, notify: Notify) -> str:
    """Train, and say in a sentence how it went."""
    texts = sources.texts(model.recipe)
    try:
        result = pretrain(
            model.recipe,
            run.path,
            train=texts.train,
            validation=texts.validation,
            tokenizer=texts.tokenizer,
            resume=run.has_begun,
            progress=False,
            notify=notify,
        )
    finally:
        free_memory()
    perplexity, rate = result.eval_perplexity or float("nan"), (result.tokens_per_second or 0) / 1e6
    return (
        f"{model.name}: held-out perplexity {perplexity:.3f}, {result.seconds:.0f} s, {rate:.2f} M tokens/s"
    )


def finetune_all(
    work: Sequence[FinetuneRun],
    runs: Path,
    sources: DataSources,
    notify: Notify = print,
    progress: Notify = print,
) -> StageResult:
    """Fine-tune the available models. Saves scores and head health of every epoch, not the models."""

    def run(one: FinetuneRun) -> None:
        began = time.monotonic()
        result = finetune(
            one.model.folder(runs) / "model",
            _task(one.task, sources.data_dir, sources.scale.rows),
            one.folder(runs),
            seeds=one.seeds,
            recipe=recipe_for(one.task, epochs=sources.scale.epochs),
            keep_model=False,
        )
        seconds = time.monotonic() - began
        progress(f"{one.name}: {result['metric']} {result['last']['mean']:.2f} in {seconds:.0f} s")

    return _with_models(work, run, runs, notify, progress)


def measure_all(
    work: Sequence[Measurement],
    runs: Path,
    sources: DataSources,
    notify: Notify = print,
    progress: Notify = print,
) -> StageResult:
    """Take the missing measurements of available models."""

    def run(one: Measurement) -> None:
        model = RunFolder(one.model.folder(runs)).model
        measurement = take_measurement(
            one.measure, model, sources.scale, one.model.recipe.length, sources.data_dir
        )
        record = {
            "run": one.model.name,
            "command": command_line(),
            "commit": commit(),
            "seed": one.model.seed,
            "environment": environment(),
        }
        path = one.file(runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**record, **measurement})
        progress(f"{one.name}: {measurement['seconds']:.1f} s")

    return _with_models(work, run, runs, notify, progress)


def missing_model(model: PretrainRun, runs: Path) -> str:
    """The name of a model if it is missing, even if its run is finished; else empty."""
    run = RunFolder(model.folder(runs))
    return "" if run.is_finished and (run.model / "config.json").exists() else model.name


@lru_cache(maxsize=16)
def _task(name: str, data_dir: Path | None, limit: int | None) -> Task:
    return load_task(name, data_dir, limit=limit)


def _with_models(
    work: Sequence[Work],
    run: Callable[[Work], None],
    runs: Path,
    notify: Notify,
    progress: Notify,
) -> StageResult:
    """Run the items whose models are there; one sentence names the missing ones."""

    def run_and_free(item: Work) -> None:
        try:
            run(item)
        finally:
            free_memory()

    items = [
        WorkItem(
            item.name,
            partial(item.is_done, runs),
            partial(run_and_free, item),
            partial(missing_model, item.model, runs),
        )
        for item in work
    ]
    result = work_through(items, runs, notify, progress)
    missing = list(dict.fromkeys(result.waiting.values()))
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        notify(
            f"{len(result.waiting)} items wait for models that are not in {runs}: "
            f"{', '.join(missing[:NAMED])}{more}; pretrain them first (--stage pretrain)"
        )
    return result

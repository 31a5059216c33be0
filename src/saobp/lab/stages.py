"""The stages after pretraining: fine-tuning and measurements of models that are there."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from saobp.benchmarking.machine import commit
from saobp.data.tasks import Task, load_task
from saobp.lab.clock import Deadline, TimeIsUpError
from saobp.lab.measures import take
from saobp.lab.plan import Measured, Trained, Tuned
from saobp.lab.pretraining import Say, StageResult, free_memory
from saobp.lab.sharing import STEP_SECONDS, TaskTimes
from saobp.lab.sources import Sources
from saobp.training.files import write_json
from saobp.training.finetune import finetune, recipe_for
from saobp.training.runs import RunFolder, environment

NO_MODEL = "its model is not there"

Work = TypeVar("Work", Tuned, Measured)


def finetune_all(
    work: Sequence[Tuned],
    runs: Path,
    sources: Sources,
    *,
    deadline: Deadline | None = None,
    say: Say = print,
) -> StageResult:
    """Fine-tune what is not finished yet and is expected to end before the deadline.

    No fine-tuned model is kept: the scores and the health of every epoch are.
    """
    scale, times = sources.scale, TaskTimes(STEP_SECONDS if torch.cuda.is_available() else 0.0)

    def one(tuned: Tuned) -> None:
        began = time.monotonic()
        found = finetune(
            tuned.model.folder(runs) / "model",
            _task(tuned.task, sources.data_dir, scale.rows),
            tuned.folder(runs),
            seeds=[tuned.model.seed],
            recipe=recipe_for(tuned.task, epochs=scale.epochs),
            keep_model=False,
        )
        seconds = time.monotonic() - began
        times.learn(tuned.task, seconds)
        say(f"{tuned.name}: {found['metric']} {found['last']['mean']:.2f} in {seconds:.0f} s")

    return _each(
        work,
        lambda tuned: (tuned.folder(runs) / "result.json").exists(),
        one,
        runs,
        deadline,
        lambda tuned: times.expected(tuned.task),
        say,
    )


def measure_all(
    work: Sequence[Measured],
    runs: Path,
    sources: Sources,
    *,
    deadline: Deadline | None = None,
    say: Say = print,
) -> StageResult:
    """Take the measurements that are not there yet."""
    known: dict[str, float] = {}

    def one(measured: Measured) -> None:
        run = RunFolder(measured.model.folder(runs))
        length = measured.model.recipe.length
        taken = take(measured.measure, run.model, sources.scale, length, sources.data_dir)
        record = {"run": measured.model.name, "commit": commit(), "environment": environment()}
        path = measured.file(runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**record, **taken})
        known[measured.measure] = taken["seconds"]
        say(f"{measured.name}: {taken['seconds']:.1f} s")

    return _each(
        work,
        lambda measured: measured.file(runs).exists(),
        one,
        runs,
        deadline,
        lambda measured: known.get(measured.measure, 0.0),
        say,
    )


@functools.lru_cache(maxsize=16)
def _task(name: str, data_dir: Path | None, limit: int | None) -> Task:
    return load_task(name, data_dir, limit=limit)


def has_model(model: Trained, runs: Path) -> bool:
    run = RunFolder(model.folder(runs))
    return run.is_finished and (run.model / "config.json").exists()


def _each(
    work: Sequence[Work],
    is_done: Callable[[Work], bool],
    do: Callable[[Work], None],
    runs: Path,
    deadline: Deadline | None,
    expected: Callable[[Work], float],
    say: Say,
) -> StageResult:
    deadline = deadline or Deadline()
    result = StageResult()
    for one in work:
        if is_done(one):
            result.reused.append(one.name)
        elif not has_model(one.model, runs):
            result.failed[one.name] = NO_MODEL
        elif not deadline.allows(expected(one)):
            result.left.append(one.name)
        else:
            try:
                with deadline.enforced():
                    do(one)
                result.done.append(one.name)
            except TimeIsUpError:
                result.left.append(one.name)
                say(f"{one.name} was stopped because the time is up")
            except (ValueError, OSError, RuntimeError) as problem:
                result.failed[one.name] = str(problem).split("\n")[0]
                say(f"{one.name} failed: {result.failed[one.name]}")
            finally:
                free_memory()
    return result

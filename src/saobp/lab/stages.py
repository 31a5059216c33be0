"""The stages after pretraining: fine-tuning and measurements of models that are there."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path

from saobp.benchmarking.machine import commit
from saobp.data.tasks import Task, load_task
from saobp.lab.clock import Deadline
from saobp.lab.data_sources import Sources
from saobp.lab.estimates import Estimates
from saobp.lab.measurements import take
from saobp.lab.plan import Measured, Trained, Tuned
from saobp.lab.pretraining import free_memory
from saobp.lab.work_queue import Piece, Say, StageResult, work_through
from saobp.runs.folder import RunFolder
from saobp.runs.json_files import write_json
from saobp.runs.provenance import command_line, environment
from saobp.training.finetune import finetune, recipe_for

NAMED = 3
"""Models that a sentence about what is lacking names."""


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
    deadline, scale, estimates = deadline or Deadline(), sources.scale, Estimates(runs)

    def do(tuned: Tuned) -> None:
        began = time.monotonic()
        try:
            found = finetune(
                tuned.model.folder(runs) / "model",
                _task(tuned.task, sources.data_dir, scale.rows),
                tuned.folder(runs),
                seeds=[tuned.model.seed],
                recipe=recipe_for(tuned.task, epochs=scale.epochs),
                keep_model=False,
            )
        finally:
            free_memory()
        seconds = time.monotonic() - began
        estimates.learn(tuned, seconds)
        say(f"{tuned.name}: {found['metric']} {found['last']['mean']:.2f} in {seconds:.0f} s")

    return _of_models(
        [
            Piece(
                one.name,
                functools.partial(is_tuned, one, runs),
                functools.partial(do, one),
                functools.partial(estimates.later, one),
                functools.partial(lacking_model, one.model, runs),
            )
            for one in work
        ],
        runs,
        deadline,
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
    deadline, estimates = deadline or Deadline(), Estimates(runs)

    def do(measured: Measured) -> None:
        run = RunFolder(measured.model.folder(runs))
        length = measured.model.recipe.length
        try:
            taken = take(measured.measure, run.model, sources.scale, length, sources.data_dir)
        finally:
            free_memory()
        record = {
            "run": measured.model.name,
            "command": command_line(),
            "commit": commit(),
            "seed": measured.model.seed,
            "environment": environment(),
        }
        path = measured.file(runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**record, **taken})
        estimates.learn(measured, taken["seconds"])
        say(f"{measured.name}: {taken['seconds']:.1f} s")

    return _of_models(
        [
            Piece(
                one.name,
                functools.partial(is_measured, one, runs),
                functools.partial(do, one),
                functools.partial(estimates.later, one),
                functools.partial(lacking_model, one.model, runs),
            )
            for one in work
        ],
        runs,
        deadline,
        say,
    )


def is_tuned(tuned: Tuned, runs: Path) -> bool:
    return RunFolder(tuned.folder(runs)).is_finished


def is_measured(measured: Measured, runs: Path) -> bool:
    return measured.file(runs).exists()


def lacking_model(model: Trained, runs: Path) -> str:
    """The name of a model that is not there, also if its run is finished; empty if it is there."""
    run = RunFolder(model.folder(runs))
    return "" if run.is_finished and (run.model / "config.json").exists() else model.name


@functools.lru_cache(maxsize=16)
def _task(name: str, data_dir: Path | None, limit: int | None) -> Task:
    return load_task(name, data_dir, limit=limit)


def _of_models(pieces: Sequence[Piece], runs: Path, deadline: Deadline, say: Say) -> StageResult:
    result = work_through(pieces, runs, deadline, say)
    absent = list(dict.fromkeys(result.lacking.values()))
    if absent:
        more = f" and {len(absent) - NAMED} more" if len(absent) > NAMED else ""
        say(
            f"{len(result.lacking)} pieces of work wait for models that are not in {runs}: "
            f"{', '.join(absent[:NAMED])}{more}; pretrain them here, or bring them with --unpack"
        )
    return result

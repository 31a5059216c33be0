"""BLiMP and GLUE of the arena's pretrained encoders, measured by several processes on one GPU.

    python benchmarks/arena_tasks.py run --out runs/arena --data-dir DATA --workers 12 --only '*-1[1-8]'
    python benchmarks/arena_runs.py --out runs/arena --pack records.tar.xz

Run folders are in OUT/runs. BLiMP's result goes to RUN/blimp, that of each GLUE task to RUN/glue/TASK, and
``saobp arena OUT/runs`` shows both. The second command puts all records, without models and BLiMP's items,
into one file. Processes take the next measurement that nobody has: one pretraining seed after another, so
that time sets the number of seeds, and the longest of a seed first. A second call continues after a kill.

Fixed before the first run: every model is fine-tuned by the package's own recipes (batches of 32, three
epochs, five of CoLA, STS-B, MRPC and RTE, linear decay after 10 % warm-up) at a rate of 3e-4, on sequences of
up to 128 tokens as in pretraining, and on at most 16,384 rows of a task, the same ones for all models. That
is 8,965 steps a model. The rate is the highest of those that Turc et al. (2019) tried for compact BERTs: it
is a thirteenth of pretraining's. Each model is fine-tuned once, with the seed of its pretraining, so a pair
shares both seeds. Scores are those of the last epoch on the validation rows: no epoch is selected on them.
WNLI is left out: 65 of its 71 validation rows share a premise with training rows, and in 62 the most similar
of these has the other label, so that learning lowers the score.

The answer is the mean over the eight tasks' main metrics per seed, method minus Original, with a 95 % paired
t interval over pretraining seeds. Single tasks decide nothing.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from fnmatch import fnmatch
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from paired_runs import claimed, run_workers

from saobp.data.tasks import Task, load_task
from saobp.lab.arena_records import BLIMP, GLUE, GLUE_TASKS
from saobp.runs.folder import RunFolder
from saobp.runs.layout import RESULT, run_folders
from saobp.runs.worker_processes import WATCH_VARIABLE, end_with_parent

RATE = 3e-4
LENGTH = 128
ROWS = 16_384
MEASURES = (BLIMP, *GLUE_TASKS)

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder whose runs/ has the pretraining runs.")],
    data_dir: Annotated[Path, typer.Option(help="Folder with the tasks' files.")],
    workers: Annotated[int, typer.Option(help="Processes at a time.", min=1)] = 1,
    only: Annotated[str, typer.Option(help="Patterns of the runs' names joined by commas.")] = "*",
    tasks: Annotated[str, typer.Option(help="Measures joined by commas.")] = ",".join(MEASURES),
    limit: Annotated[
        int | None, typer.Option(help="Most rows of a task, to try it: results are in OUT/trial.", min=1)
    ] = None,
) -> None:
    """Measure what is not measured yet of every run that has a model."""
    chosen = tasks.split(",")
    if unknown := set(chosen) - set(MEASURES):
        raise typer.BadParameter(f"{unknown.pop()!r} is not one of {', '.join(MEASURES)}")
    names = open_measurements(out / "runs", only, chosen, limit)
    print(f"{len(names)} measurements", flush=True)
    if names:
        run_workers(__file__, out / "tasks", [str(out / "runs"), str(data_dir), limit, names], workers)
    left = [name for name in names if not place(out / "runs", name, limit).joinpath(RESULT).exists()]
    print(f"{len(names) - len(left)} done; not done: {', '.join(left) or 'none'}")


def open_measurements(runs: Path, only: str, tasks: list[str], limit: int | None = None) -> list[str]:
    """``TASK.RUN`` for all that has no result: a seed after the other, and the longest of a seed first."""
    found = [RunFolder(path) for path in run_folders(runs) if matches(path.name, only)]
    ready = [run for run in found if run.is_finished and run.model.is_dir()]
    by_seed = groupby(sorted(ready, key=seed_of), seed_of)
    names = [
        f"{task}.{run.path.name}"
        for own in (list(runs_of_seed) for _, runs_of_seed in by_seed)
        for task in MEASURES
        if task in tasks
        for run in own
    ]
    return [name for name in names if not place(runs, name, limit).joinpath(RESULT).exists()]


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns.split(","))


def seed_of(run: RunFolder) -> int:
    """The seed of a pretraining run, which is also that of its fine-tuning."""
    return int(run.recipe["seed"])


def place(runs: Path, name: str, limit: int | None = None) -> Path:
    """Folder of a measurement's result: in that of its run, or apart if it is of a few rows alone."""
    task, _, run = name.partition(".")
    own = runs if limit is None else runs.with_name("trial") / f"{limit}-rows"
    return own / run / (BLIMP if task == BLIMP else f"{GLUE}/{task}")


@app.command(hidden=True)
def work(out: Annotated[Path, typer.Option()], given: Annotated[str, typer.Option()]) -> None:
    """One worker: makes measurements until none is left."""
    import torch
    from transformers.utils import logging

    end_with_parent()
    logging.set_verbosity_error()
    runs, data_dir, limit, names = json.loads(given)
    for name in claimed(out, names):
        try:
            measure(Path(runs), name, data_dir, limit)
        except Exception:
            traceback.print_exc()
            if torch.cuda.is_available():  # an error of CUDA stays with its process
                os.environ[WATCH_VARIABLE] = "1"
                os.execv(sys.executable, [sys.executable, *sys.argv])


def measure(runs: Path, name: str, data_dir: str, limit: int | None = None) -> None:
    """Evaluate a model on BLiMP, or fine-tune it on a task of GLUE."""
    from saobp.training.evaluation.run import evaluate
    from saobp.training.finetune import finetune, recipe_for

    task, _, run = name.partition(".")
    folder, made = place(runs, name, limit), RunFolder(runs / run)
    if task == BLIMP:
        evaluate(made.model, [BLIMP], data_dir=data_dir, folder=folder, limit=limit)
        return
    finetune(
        made.model,
        rows_of(task, data_dir, limit or ROWS),
        folder,
        seeds=[seed_of(made)],
        recipe=recipe_for(task, rate=RATE, length=LENGTH, health_texts=0),
        keep_model=False,
        checkpoint_seconds=1e9,
        notify=print,
    )


@cache
def rows_of(task: str, data_dir: str, limit: int) -> Task:
    """Rows of a task, read once by each process."""
    return load_task(task, data_dir, limit=limit)


if __name__ == "__main__":
    app()

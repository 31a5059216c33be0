"""Does ``high:learned`` help a trained encoder in fine-tuning? Plain against learned, in pairs of seeds.

    python benchmarks/existing_encoder.py run --plan minilm --model FOLDER --data-dir FOLDER --out FOLDER
    python benchmarks/existing_encoder.py table --out FOLDER

Tasks: STS-B, MRPC, RTE, CoLA and SST-2, each over five seeds. A pair shares the seed: order of the rows,
initial head, learning rates. Learned strengths start at 0, so both start from the same function. Scores are
those of the last epoch on the validation rows, so no epoch is selected on them.

Fixed before the first run: the answer is the mean of the five tasks' main metrics per seed, learned minus
plain, with a 95 % paired t interval over the five seeds. It helps if the interval lies above zero, harms if
below; an interval that holds zero is no gain. Intervals of single tasks are shown and decide nothing: of five
of them, one leaves zero out by chance in about every fifth experiment. That holds for both plans; mpnet's
recipe was made cheaper on 17 November 2026, before its first run.

Workers are processes that take the next run that nobody has, the longest first; several share one GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from paired_runs import claimed, compare, run_workers

from saobp.runs.folder import RunFolder
from saobp.runs.worker_processes import end_with_parent

TASKS = ("sst2", "cola", "stsb", "rte", "mrpc")
"""The longest first."""
METHODS = {"plain": "none", "learned": "high:learned"}
SEEDS = (1, 2, 3, 4, 5)


class Plan(NamedTuple):
    """How a model is fine-tuned.

    rows:   most training rows of a task, a fixed sample where it has more
    epochs: of every task; None: three of SST-2 and five of the others
    """

    rate: float
    batch: int
    rows: int
    epochs: int | None = None


PLANS = {"minilm": Plan(5e-5, 32, 16_384), "mpnet": Plan(5e-5, 64, 8_192, epochs=3)}

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def run(
    plan: Annotated[str, typer.Option(help=f"Recipe: {' or '.join(PLANS)}.")],
    model: Annotated[Path, typer.Option(help="Folder of the model and its tokenizer.")],
    data_dir: Annotated[Path, typer.Option(help="Folder with the tasks' files.")],
    out: Annotated[Path, typer.Option(help="Folder for the runs.")],
    workers: Annotated[int, typer.Option(help="Processes at a time.", min=1)] = 1,
    tasks: Annotated[str, typer.Option(help="Tasks joined by commas.")] = ",".join(TASKS),
    seeds: Annotated[str, typer.Option(help="Seeds joined by commas.")] = ",".join(map(str, SEEDS)),
    epochs: Annotated[int | None, typer.Option(help="Instead of the plan's, to try it.")] = None,
    limit: Annotated[int | None, typer.Option(help="Most rows, instead of the plan's, to try it.")] = None,
) -> None:
    """Fine-tune every task, method and seed that is not finished, then print the table."""
    if plan not in PLANS:
        raise typer.BadParameter(f"{plan!r} is not a plan: choose {' or '.join(PLANS)}")
    recipe = PLANS[plan]
    recipe = recipe._replace(epochs=epochs or recipe.epochs, rows=limit or recipe.rows)
    chosen = tasks.split(","), [*map(int, seeds.split(","))]
    given = [str(model), str(data_dir), *chosen, recipe]
    run_workers(__file__, out, given, workers)
    table(out)


@app.command(hidden=True)
def work(out: Annotated[Path, typer.Option()], given: Annotated[str, typer.Option()]) -> None:
    """One worker: takes runs until none is left."""
    from dataclasses import replace

    from transformers.utils import logging

    from saobp.data.tasks import load_task
    from saobp.training.finetune import finetune, recipe_for

    end_with_parent()
    logging.set_verbosity_error()
    model, data_dir, tasks, seeds, plan = json.loads(given)
    rate, batch, most, epochs = plan
    names = [f"{task}-{method}-{seed}" for seed in seeds for task in tasks for method in METHODS]
    for name in claimed(out, names):
        task, method, seed = name.split("-")
        recipe = recipe_for(task, rate=rate, batch=batch, epochs=epochs)
        rows = load_task(task, data_dir, limit=most)
        finetune(
            model, rows, out / task / method / seed, seeds=[int(seed)], refinement=METHODS[method],
            recipe=replace(recipe, health_texts=8), keep_model=False, checkpoint_seconds=1e9,
        )  # fmt: skip


@app.command()
def table(out: Annotated[Path, typer.Option(help="Folder of the runs.")]) -> None:
    """Print scores and paired differences, and write them to OUT/summary.json."""
    from saobp.storage.json_files import write_json

    scores: dict[str, dict[str, dict[int, float]]] = {}
    metrics: dict[str, str] = {}
    facts: dict[str, Any] = {}
    strengths: dict[str, dict[int, Any]] = {}
    for name in TASKS:
        for path in sorted(out.glob(f"{name}/*/*/result.json")):
            found = json.loads(path.read_text())
            method, seed = path.parts[-3], int(path.parts[-2])
            run = RunFolder(path.parent / f"seed-{seed}")
            metrics[name], facts[name] = found["metric"], _facts(run, found["rows"])
            scores.setdefault(name, {}).setdefault(method, {})[seed] = found["last"]["mean"]
            if method == "learned":
                last = run.health()[-1]["strengths"]
                strengths.setdefault(name, {})[seed] = [[round(one, 4) for one in layer] for layer in last]
    whole = [name for name in TASKS if set(scores.get(name, {})) == set(METHODS)]
    common = [set.intersection(*(set(scores[name][method]) for method in METHODS)) for name in whole]
    shared = sorted(set.intersection(*common)) if common else []
    scores["mean"] = {
        method: {seed: sum(scores[name][method][seed] for name in whole) / len(whole) for seed in shared}
        for method in METHODS
    }
    summary: dict[str, Any] = {"tasks": {}, "facts": facts, "strengths": strengths}
    print("| task | metric | pairs | plain | learned | difference [95 %] | |\n|---|---|---|---|---|---|---|")
    for name in [*whole, "mean"]:
        own = scores[name]
        gain = compare([name, metrics.get(name, "")], own["learned"], own["plain"], digits=2)
        if gain is not None:
            summary["tasks"][name] = {"metric": metrics.get(name), "scores": own, **vars(gain)}
    write_json(out / "summary.json", summary)


def _facts(run: RunFolder, rows: dict[str, int]) -> dict[str, Any]:
    """Recipe, data, software and hardware of a run."""
    recipe = {name: run.recipe[name] for name in ("epochs", "batch", "rate", "strength_rate", "length")}
    record = {name: run.record[name] for name in ("commit", "data", "environment")}
    return {"rows": rows, **recipe, **record}


if __name__ == "__main__":
    app()

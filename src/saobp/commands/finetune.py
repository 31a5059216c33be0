"""``saobp finetune``: fine-tune a checkpoint on tasks, over several seeds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from saobp.commands.import_option import Imports, import_user_code
from saobp.commands.streams import (
    check_data_dir,
    error_message,
    fail,
    print_error,
    print_note,
    print_result,
    stdout_console,
)
from saobp.progress import ProgressBar, ProgressBars
from saobp.storage.model_folders import checked_folder

if TYPE_CHECKING:
    from saobp.data.tasks import TaskSpec
    from saobp.training.finetune import FinetuneRecipe


def finetune(
    model: Annotated[str, typer.Option(help="Folder of a model with its tokenizer, such as RUN/model.")],
    task: Annotated[
        str,
        typer.Option("--task", "--tasks", help="Tasks joined by commas; glue for nine, all for twelve."),
    ] = "all",
    seeds: Annotated[str, typer.Option(help="Seeds joined by commas.")] = "42",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' files; without it they come from the hub.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs: OUT/TASK/seed-42.")] = Path("runs/finetune"),
    refinement: Annotated[
        str | None, typer.Option(help="Take this instead of the checkpoint's own; none takes it off.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="So many examples of each split, for a quick look.", min=1)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the task's own.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples of a step.")] = None,
    rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    length: Annotated[int | None, typer.Option(help="Longest sequence in tokens.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    keep_model: Annotated[bool, typer.Option(help="Keep each seed's last model.")] = True,
    portable: Annotated[
        bool, typer.Option("--portable", help="Save code with each model, so that it loads without saobp.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Tasks at a time, each in a process of its own.", min=1)] = 1,
    imports: Imports = None,
) -> None:
    """Fine-tune a checkpoint on GLUE, SQuAD, HellaSwag or RACE-Middle, and score every epoch."""
    changes = {"epochs": epochs, "batch": batch, "rate": rate, "length": length, "compiled": compiled}
    try:
        from saobp.commands.refinement_option import parse_refinement_option
        from saobp.data.tasks import choose_tasks
        from saobp.training.checkpoints import config_of
        from saobp.training.finetune import checked_seeds, recipe_for

        import_user_code(imports)
        checked_folder(model)
        specs = choose_tasks(task)
        check_data_dir(data_dir)
        recipes = {spec.name: recipe_for(spec, **changes) for spec in specs}
        numbers = checked_seeds(parse_seeds(seeds))
        if refinement is not None:
            parse_refinement_option(refinement)
        config_of(model)  # checked once, not per task
        if jobs > 1 and len(specs) > 1:
            options: dict[str, Any] = {
                "model": model, "seeds": seeds, "data-dir": data_dir, "out": out, "refinement": refinement,
                "limit": limit, "epochs": epochs, "batch": batch, "rate": rate, "length": length,
            }  # fmt: skip
            line = [f"--{name}={value}" for name, value in options.items() if value is not None]
            line += [
                *(["--compile"] if compiled else []),
                "--keep-model" if keep_model else "--no-keep-model",
                *(f"--import={name}" for name in imports or ()),
                *(["--portable"] if portable else []),
            ]
            found = _side_by_side(specs, line, jobs, data_dir, out)
        else:
            found = _in_turn(
                specs, recipes, model, numbers, data_dir, out, refinement, limit, keep_model, portable
            )
    except (ValueError, OSError) as problem:
        fail(problem)
    except KeyboardInterrupt:
        print_note("Stopped. The same command goes on: finished seeds stay, one begun from its checkpoint.")
        raise
    if found:
        stdout_console().print(results_table(found))
        print_result(f"results are in {out}")
    if len(found) < len(specs):
        raise typer.Exit(1)


def _in_turn(
    specs: Sequence[TaskSpec],
    recipes: dict[str, FinetuneRecipe],
    model: str,
    seeds: list[int],
    data_dir: Path | None,
    out: Path,
    refinement: str | None,
    limit: int | None,
    keep_model: bool,
    portable: bool,
) -> list[dict[str, Any]]:
    """Run tasks one by one in this process; a failing one is skipped."""
    from saobp.commands.quiet_logs import quiet_transformers
    from saobp.data.tasks import load_task
    from saobp.training.finetune import finetune as run

    quiet_transformers()
    found = []
    with ProgressBars() as bars:
        shown: dict[str, ProgressBar] = {}
        for spec in specs:

            def progress(seed: int, done: int, total: int, name: str = spec.name) -> None:
                words = f"{name} seed {seed}"
                if words not in shown:
                    shown[words] = bars.add(words)
                shown[words](done, total)

            try:
                rows = load_task(spec, data_dir, limit=limit)
                for words in rows.notes:
                    print_note(f"{spec.name}: {words}")
                found.append(
                    run(
                        model, rows, out / spec.name, seeds=seeds, recipe=recipes[spec.name],
                        refinement=refinement, keep_model=keep_model, portable=portable, progress=progress,
                        notify=print_note,
                    )
                )  # fmt: skip
            except (ValueError, OSError) as problem:
                print_error(f"{spec.name} failed: {error_message(problem)}")
    return found


def _side_by_side(
    specs: Sequence[TaskSpec], line: list[str], jobs: int, data_dir: Path | None, out: Path
) -> list[dict[str, Any]]:
    """Run several tasks in parallel, the largest first, each in a subprocess of this command."""
    from saobp.data.tasks.load import find_file
    from saobp.runs.folder import RunFolder
    from saobp.runs.worker_processes import run_jobs

    ordered = list(specs)
    if data_dir is not None:
        ordered.sort(key=lambda spec: -find_file(spec, "train", data_dir).stat().st_size)
    commands = {
        spec.name: [sys.executable, "-m", "saobp", "finetune", f"--task={spec.name}", *line]
        for spec in ordered
    }
    logs = out / "logs"
    with ProgressBars() as bars:
        bar, ended = bars.add(f"{jobs} tasks at a time"), 0

        def done(name: str, code: int) -> None:
            nonlocal ended
            ended += 1
            bar(ended, len(commands))
            if code:
                print_error(f"{name} failed; see {logs / name}.log")

        codes = run_jobs(commands, jobs, logs, done)
    return [RunFolder(out / spec.name).result for spec in specs if codes[spec.name] == 0]


def parse_seeds(text: str) -> list[int]:
    """Parse comma-separated integers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"seeds are whole numbers joined by commas, not {text!r}") from None


def results_table(results: list[dict[str, Any]]) -> Table:
    """Best and last epoch of every task, mean and standard deviation over seeds."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("task", "metric", "seeds", "best epoch", "last epoch", ""):
        table.add_column(name, justify="left" if name in ("task", "metric", "") else "right")
    for result in results:
        several = len(result["seeds"]) > 1
        cells = [
            f"{metrics['mean']:.2f} ± {metrics['std']:.2f}" if several else f"{metrics['mean']:.2f}"
            for metrics in (result["best"], result["last"])
        ]
        mark = "partial data" if result["partial"] else ""
        table.add_row(result["task"], result["metric"], str(len(result["seeds"])), *cells, mark)
    return table

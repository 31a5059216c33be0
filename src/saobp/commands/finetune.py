"""``saobp finetune``: fine-tune a checkpoint on tasks, over several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


def finetune(
    model: Annotated[str, typer.Option(help="Folder of a model with its tokenizer, such as RUN/model.")],
    task: Annotated[str, typer.Option(help="Tasks joined by commas; glue for nine, all for twelve.")] = "all",
    seeds: Annotated[str, typer.Option(help="Seeds joined by commas.")] = "42",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' files; without it they come from the hub.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs: OUT/TASK/seed-42.")] = Path("runs/finetune"),
    refinement: Annotated[
        str | None, typer.Option(help="Take this instead of the checkpoint's own; none takes it off.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="So many rows of each split, for a quick look.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the task's own.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of a step.")] = None,
    rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    length: Annotated[int | None, typer.Option(help="Longest sequence in tokens.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    keep_model: Annotated[bool, typer.Option(help="Keep each seed's last model.")] = True,
) -> None:
    """Fine-tune a checkpoint on GLUE, SQuAD, HellaSwag or RACE-Middle, and score every epoch."""
    console = Console()
    try:
        from saobp.commands.quiet import quiet_transformers
        from saobp.data.tasks import choose_tasks, load_task
        from saobp.training.finetune import finetune as run
        from saobp.training.finetune import recipe_for

        quiet_transformers()
        changes = {"epochs": epochs, "batch": batch, "rate": rate, "length": length, "compiled": compiled}
        specs = choose_tasks(task)
        recipes = {spec.name: recipe_for(spec, **changes) for spec in specs}
        numbers = parse_seeds(seeds)
    except (ValueError, OSError) as problem:
        console.print(Text(str(problem), style="red"), soft_wrap=True)
        raise typer.Exit(1) from None
    results, failed = [], False
    with Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    ) as bars:  # fmt: skip
        for spec in specs:
            shown: dict[int, Any] = {}

            def progress(seed: int, done: int, total: int, shown: Any = shown, name: str = spec.name) -> None:
                if seed not in shown:
                    shown[seed] = bars.add_task(f"{name} seed {seed}", total=total)
                bars.update(shown[seed], completed=done)

            try:
                rows = load_task(spec, data_dir, limit=limit)
                for note in rows.notes:
                    bars.console.print(Text(f"{spec.name}: {note}"), soft_wrap=True)
                results.append(
                    run(
                        model, rows, out / spec.name, seeds=numbers, recipe=recipes[spec.name],
                        refinement=refinement, keep_model=keep_model, progress=progress,
                        say=lambda words: bars.console.print(Text(words), soft_wrap=True),
                    )
                )  # fmt: skip
            except (ValueError, OSError) as problem:
                failed = True
                words = f"{spec.name} failed: {problem}"
                bars.console.print(Text(words, style="red"), soft_wrap=True)
    if results:
        console.print(results_table(results))
        console.print(Text(f"results are in {out}"), soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def parse_seeds(text: str) -> list[int]:
    """Whole numbers joined by commas."""
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
        cells = [f"{result[name]['mean']:.2f} ± {result[name]['std']:.2f}" for name in ("best", "last")]
        mark = "partial data" if result["partial"] else ""
        table.add_row(result["task"], result["metric"], str(len(result["seeds"])), *cells, mark)
    return table

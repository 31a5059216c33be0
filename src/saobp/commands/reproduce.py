"""``saobp reproduce``: the paper's tables and figures, and questions that it leaves open, beside ours."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from saobp.commands.streams import (
    check_data_dir,
    fail,
    has_options,
    print_note,
    print_result,
    stderr_console,
    stdout_console,
)
from saobp.progress import OccasionalLines

if TYPE_CHECKING:
    from saobp.lab.experiment_plan import ExperimentPlan
    from saobp.lab.session import LabFolders

SMOKE_MINUTES = 20
"""Measured duration of all targets at the smoke scale."""
EXPLANATION = """\
[bold]saobp reproduce[/] reruns the paper's tables and figures and sets them beside ours.

  saobp reproduce --list                                        what there is
  saobp reproduce all --scale smoke                             all in miniature: 20 minutes on two cores
  saobp reproduce gtd --scale mini --data-dir data --plan       what it would run
  saobp reproduce gtd,glue --scale mini --data-dir data         runs, tables and figures in results/
  saobp reproduce glue --scale mini --recipe paper --batch 64   at the paper's printed settings

[bold]saobp reproduce --help[/] lists the options."""


def reproduce(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Argument(help="Targets joined by commas; all, tables, figures or questions.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the targets.")] = False,
    scale: Annotated[str, typer.Option(help="smoke, mini, small or medium.")] = "smoke",
    recipe: Annotated[str, typer.Option(help="fast (ours) or paper (as printed).")] = "fast",
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a batch of the recipe paper: 32, 64, 128 or 256.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="So many seeds; default: each target's own.")] = None,
    stage: Annotated[
        str,
        typer.Option(help="Only tokens, pretrain, finetune, measure or tabulate; or several with commas."),
    ] = "pretrain,finetune,measure,tabulate",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with corpora, tokenizers and tasks.")] = None,
    corpus: Annotated[str | None, typer.Option(help="Pretrain on this instead of the scale's.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="Folder of token stores, made or used.")] = None,
    runs: Annotated[Path | None, typer.Option(help="Folder of runs; finished ones are reused.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for tables and figures.")] = None,
    only: Annotated[
        str, typer.Option(help="Only runs of such names, in this order: '*-high-*,*-low-*'.")
    ] = "*",
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be done, and stop.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes that share the work of a stage.", min=1)] = 1,
) -> None:
    """Rerun the paper's tables and figures, and set them beside ours."""
    console = stdout_console()
    if not has_options(context):
        console.print(EXPLANATION)
        return
    try:
        if list_:
            _list(console)
            return
        if target is None:
            raise ValueError("name a target, such as gtd or all; saobp reproduce --list has them")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "every run has one process: leave accelerate launch out, and add --jobs for more"
            )
        from saobp.commands.quiet_logs import only_errors, quiet_transformers
        from saobp.lab import choose_experiments, get_scale
        from saobp.lab.experiment_plan import ExperimentPlan
        from saobp.lab.session import LabFolders, Session, worker_stage
        from saobp.training.progress import once, plain_sentences

        size = get_scale(scale, recipe, batch)
        check_data_dir(data_dir)
        folders = LabFolders.of(size, data_dir, tokens, runs, out)
        if corpus is not None:
            size = replace(size, corpus=corpus)
        elif size.name == "smoke" and data_dir is not None:
            size = replace(size, corpus="wikitext2_raw")
        chosen = ExperimentPlan(choose_experiments(target), size, seeds, only)
        stages = _stages(stage)
        quiet_transformers()
        own_stage = worker_stage()
        if own_stage is None:
            _show_plan(console if plan else stderr_console(), chosen, folders, stages)
            if plan:
                return
        say = once(print_note)
        with only_errors(), plain_sentences(say):
            session = Session(chosen, folders, say, OccasionalLines(stderr_console()))
            if own_stage is not None:
                session.work_on(own_stage)
            else:
                for stage_name in stages:
                    session.run(stage_name, jobs)
        if own_stage is None and "tabulate" in stages:
            print_result(f"results are in {folders.out}")
        if session.has_failed:  # reported when it happened
            raise typer.Exit(1)
    except (ValueError, OSError) as problem:
        fail(problem)
    except KeyboardInterrupt:
        print_note(
            "Interrupted. The same command goes on: what is finished stays, a run from its last checkpoint."
        )
        raise typer.Exit(130) from None


def _stages(text: str) -> list[str]:
    from saobp.lab.session import STAGES

    requested = [part.strip() for part in text.split(",")]
    unknown = [stage for stage in requested if stage not in STAGES]
    if unknown:
        raise ValueError(f"unknown stage {unknown[0]!r}: choose from {', '.join(STAGES)}")
    return [stage for stage in STAGES if stage in requested]


def _list(console: Console) -> None:
    from saobp.lab import EXPERIMENTS

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("target", "kind", "what"):
        table.add_column(name)
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.kind, experiment.title)
    console.print(table)


def _show_plan(console: Console, plan: ExperimentPlan, folders: LabFolders, stages: list[str]) -> None:
    """Pretraining runs with their state, and how many fine-tuning runs and measurements are to do."""
    from saobp.lab import choose_experiments
    from saobp.runs.folder import RunFolder
    from saobp.runs.machine import environment

    models, runs = plan.pretrain_runs(), folders.runs
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("run")
    table.add_column("state")
    to_do = 0
    for model in models:
        run = RunFolder(model.folder(runs))
        state = "finished" if run.is_finished else "begun" if run.checkpoint_steps() else "to do"
        to_do += not run.is_finished
        table.add_row(model.name, state)
    console.print(table)
    finetuning, measuring = (
        sum(not item.is_done(runs) for item in plan.work_of(stage)) for stage in ("finetune", "measure")
    )
    summary = (
        f"{to_do} of {len(models)} models to pretrain, {finetuning} fine-tuning runs and {measuring} "
        f"measurements to do on {environment()['hardware']}. Stages: {', '.join(stages)}."
    )
    console.print(Text(summary), soft_wrap=True)
    if plan.scale.name == "smoke" and to_do + finetuning + measuring:
        every = replace(plan, experiments=choose_experiments("all"), only="*")
        share = (to_do + finetuning + measuring) / _size(every)
        words = f"All targets of this scale took {SMOKE_MINUTES} minutes on two busy cores of an AMD EPYC"
        console.print(Text(f"{words}; these are {share:.0%} of it."), soft_wrap=True)


def _size(plan: ExperimentPlan) -> int:
    return len(plan.pretrain_runs()) + len(plan.finetune_runs()) + len(plan.measurements())

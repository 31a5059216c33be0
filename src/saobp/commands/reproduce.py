"""``saobp reproduce``: the paper's tables and figures, and questions that it leaves open, beside ours."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from saobp.commands.errors import check_data_dir, in_words

if TYPE_CHECKING:
    from saobp.lab.plan import Plan
    from saobp.lab.session import Places, Session

EXPLANATION = """\
[bold]saobp reproduce[/] reruns the paper's tables and figures and sets them beside ours.

  saobp reproduce --list                                        what there is
  saobp reproduce all --scale smoke                             everything in miniature, minutes on a CPU
  saobp reproduce gtd --scale mini --data-dir data --plan       what it would take
  saobp reproduce gtd,glue --scale mini --data-dir data         runs, tables and figures in results/

[bold]saobp reproduce --help[/] lists the options."""


def reproduce(
    target: Annotated[
        str | None, typer.Argument(help="Targets joined by commas; all, tables, figures or questions.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the targets.")] = False,
    scale: Annotated[str, typer.Option(help="smoke, mini, small or medium.")] = "smoke",
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
    minutes: Annotated[float | None, typer.Option(help="Begin nothing that would end later.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be done, and stop.")] = False,
    rounded: Annotated[bool, typer.Option("--rounded", help="Keep models in bfloat16.")] = False,
    pack: Annotated[Path | None, typer.Option(help="Keep small files of finished runs packed here.")] = None,
    pack_models: Annotated[str, typer.Option(help="Pack models of runs of such names too.")] = "",
    unpack: Annotated[Path | None, typer.Option(help="First unpack what --pack made there.")] = None,
    restore: Annotated[
        bool, typer.Option("--restore", help="Take runs that only pages in --out know of from their records.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes that share the work of a stage.", min=1)] = 1,
) -> None:
    """Rerun the paper's tables and figures, and set them beside ours."""
    began = time.time()
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    if target is None and not list_:
        console.print(EXPLANATION)
        return

    def say(sentence: str, style: str = "") -> None:
        console.print(Text(sentence, style=style), soft_wrap=True)

    try:
        if list_:
            _list(console)
            return
        assert target is not None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "every run has one process: leave accelerate launch out, and add --jobs for more"
            )
        from saobp.commands.quiet_logs import only_errors, quiet_transformers
        from saobp.lab import choose_experiments, get_scale
        from saobp.lab.bundle import kept_packed
        from saobp.lab.bundle import unpack as unpacked
        from saobp.lab.clock import Deadline
        from saobp.lab.plan import Plan
        from saobp.lab.restore import restore as restored
        from saobp.lab.session import Places, Session, shared_stage

        size = get_scale(scale)
        check_data_dir(data_dir)
        places = Places.of(size, data_dir, tokens, runs, out)
        if corpus is not None:
            size = replace(size, corpus=corpus)
        elif size.name == "smoke" and data_dir is not None:
            size = replace(size, corpus="wikitext2_raw")
        chosen = Plan(choose_experiments(target), size, seeds, only)
        stages = _stages(stage)
        quiet_transformers()
        shared = shared_stage()
        if shared is not None:
            with only_errors():
                session = Session(chosen, places, Deadline(minutes, shared[1]), rounded=rounded, say=say)
                session.share(shared[0])
            _leave(session)
            return
        if unpack is not None:
            say(f"unpacked {len(unpacked(unpack, places.runs, say))} files")
        if restore:
            say(f"restored {len(restored(chosen, places.runs, places.out))} runs")
        _show_plan(console, chosen, places, stages, jobs)
        if plan:
            return
        packing = nullcontext() if pack is None else kept_packed(
            places.runs, pack, models=pack_models, rounded=rounded, say=say
        )  # fmt: skip
        with only_errors(), packing:
            session = Session(chosen, places, Deadline(minutes, began), rounded=rounded, say=say)
            for one in stages:
                session.do(one, jobs)
        _leave(session)
    except (ValueError, TypeError, OSError) as problem:
        say(in_words(problem), "red")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say("Interrupted. The same command goes on: what is finished stays, a run from its last checkpoint.")
        raise typer.Exit(130) from None


def _leave(session: Session) -> None:
    """What failed was said when it did; the exit code tells a script."""
    if session.has_failed:
        raise typer.Exit(1)


def _stages(text: str) -> list[str]:
    from saobp.lab.session import STAGES

    asked = [part.strip() for part in text.split(",")]
    unknown = [one for one in asked if one not in STAGES]
    if unknown:
        raise ValueError(f"unknown stage {unknown[0]!r}: choose from {', '.join(STAGES)}")
    return [one for one in STAGES if one in asked]


def _list(console: Console) -> None:
    from saobp.lab import EXPERIMENTS

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("target", "kind", "what"):
        table.add_column(name)
    for one in EXPERIMENTS.values():
        table.add_row(one.name, one.kind, one.title)
    console.print(table)


def _show_plan(console: Console, plan: Plan, places: Places, stages: list[str], jobs: int) -> None:
    """Runs with their state, and what those to come are expected to take."""
    from saobp.lab.estimates import Estimates, disk_bytes
    from saobp.lab.pretraining import share_left
    from saobp.lab.stages import is_measured, is_tuned
    from saobp.runs.folder import RunFolder

    models, runs = plan.trained(), places.runs
    estimates = Estimates(runs, jobs)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("run", "state", "seconds"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    open_, total = [], 0.0
    for model in models:
        run = RunFolder(model.folder(runs))
        state = "finished" if run.is_finished else "begun" if run.checkpoint_steps() else "to do"
        seconds = 0.0 if run.is_finished else estimates.pretraining(model) * share_left(run, model.recipe)
        total += seconds
        open_ += [] if run.is_finished else [model]
        table.add_row(model.name, state, f"{seconds:.0f}" if seconds else "")
    console.print(table)
    tuned = [one for one in plan.tuned() if not is_tuned(one, runs)]
    measured = [one for one in plan.measured() if not is_measured(one, runs)]
    words = (
        f"{len(open_)} of {len(models)} models to pretrain{_expected([total], jobs) if open_ else ''}"
        f"{f' with {_bytes(disk_bytes(open_))}' if open_ else ''}, {len(tuned)} fine-tuning runs"
        f"{_expected(map(estimates.later, tuned), jobs)} and {len(measured)} measurements"
        f"{_expected(map(estimates.later, measured), jobs)} to do on {estimates.hardware}"
        f"{f' in {jobs} processes' if jobs > 1 else ''}. Stages: {', '.join(stages)}."
    )
    console.print(Text(words), soft_wrap=True)


def _expected(pieces: Iterable[float], jobs: int) -> str:
    """In words, from seconds; 0 is what was never done on a CPU, of which nothing is known."""
    seconds = list(pieces)
    if not seconds:
        return ""
    if not all(seconds):
        return f" (time not known yet for {sum(not one for one in seconds)})"
    whole = sum(seconds) / jobs
    return f" (about {whole:.0f} seconds)" if whole < 120 else f" (about {whole / 60:.0f} minutes)"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"

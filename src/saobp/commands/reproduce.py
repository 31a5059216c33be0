"""``saobp reproduce``: the paper's tables and figures, and questions that it leaves open, beside ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from saobp.lab.clock import Deadline
    from saobp.lab.plan import Plan, Tuned
    from saobp.lab.pretraining import StageResult
    from saobp.lab.scales import Scale
    from saobp.lab.sources import Sources

STAGES = ("tokens", "pretrain", "finetune", "measure", "tabulate")
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
    only: Annotated[str, typer.Option(help="Only runs of such a name: 'bert-mini-high-*'.")] = "*",
    minutes: Annotated[float | None, typer.Option(help="Begin nothing that would end later.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be done, and stop.")] = False,
    rounded: Annotated[bool, typer.Option("--rounded", help="Keep models in bfloat16.")] = False,
    pack: Annotated[Path | None, typer.Option(help="Afterwards pack small files of all runs here.")] = None,
    pack_models: Annotated[str, typer.Option(help="Pack models of runs of such a name too.")] = "",
    unpack: Annotated[Path | None, typer.Option(help="First unpack what --pack made there.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share fine-tuning or measurements.", min=1)] = 1,
    share: Annotated[str, typer.Option(help="Which part of them is done here, such as 1/4.")] = "1/1",
) -> None:
    """Rerun the paper's tables and figures, and set them beside ours."""
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
        from saobp.commands.quiet import only_errors
        from saobp.lab import choose_experiments, get_scale
        from saobp.lab.clock import Deadline
        from saobp.lab.plan import Plan

        size = get_scale(scale)
        places = _Places(size, data_dir, tokens, runs, out)
        if corpus is not None:
            size = replace(size, corpus=corpus)
        elif size.name == "smoke" and data_dir is not None:
            size = replace(size, corpus="wikitext2_raw")
        chosen = Plan(choose_experiments(target), size, seeds, only)
        stages = _stages(stage)
        is_whole = share == "1/1"
        if unpack is not None and is_whole:
            from saobp.lab.bundle import unpack as unpacked

            say(f"unpacked {len(unpacked(unpack.glob('runs.tar.xz.*'), places.runs))} files")
        _show_plan(console, chosen, places, stages)
        if not plan:
            work = _Work(chosen, places, Deadline(minutes), rounded, parse_share(share), say)
            with only_errors():
                for one in stages:
                    if jobs > 1 and one in ("finetune", "measure"):
                        say(f"{one}: {jobs} processes, whose words are in {places.runs / 'logs'}")
                        _side_by_side(one, jobs, places, work.deadline)
                        say(f"{one}: {work.count_missing(one)} left to do")
                    else:
                        work.do(one)
        if pack is not None and is_whole:
            from saobp.lab.bundle import pack as packed

            for path in packed(places.runs, pack, models=pack_models):
                say(f"packed {path} ({path.stat().st_size / 2**20:.1f} MiB)")
    except (ValueError, TypeError, OSError) as problem:
        say(str(problem), "red")
        raise typer.Exit(1) from None


class _Places:
    """The folders that were named, or by default those below ``runs``; smoke keeps to itself."""

    def __init__(
        self, scale: Scale, data_dir: Path | None, tokens: Path | None, runs: Path | None, out: Path | None
    ) -> None:
        smoke = scale.name == "smoke"
        self.runs = runs or Path("runs/smoke" if smoke else "runs/lab")
        self.tokens = tokens or (self.runs / "tokens" if smoke else Path("tokens"))
        self.out = out or (self.runs / "results" if smoke else Path("results"))
        self.data_dir = data_dir
        self.invents = smoke and data_dir is None

    def sources(self, scale: Scale) -> Sources:
        from saobp.lab.sources import Sources, make_up

        data = make_up(self.runs / "data") if self.invents else self.data_dir
        return Sources(scale, self.tokens, data)


def _stages(text: str) -> list[str]:
    asked = [part.strip() for part in text.split(",")]
    unknown = [one for one in asked if one not in STAGES]
    if unknown:
        raise ValueError(f"unknown stage {unknown[0]!r}: choose from {', '.join(STAGES)}")
    return [one for one in STAGES if one in asked]


class _Work:
    """One invocation: what is planned, where, and how long."""

    def __init__(
        self,
        plan: Plan,
        places: _Places,
        deadline: Deadline,
        rounded: bool,
        share: tuple[int, int],
        say: Callable[..., None],
    ) -> None:
        from saobp.commands.quiet import quiet_transformers

        quiet_transformers()
        self.plan, self.places, self.deadline, self.rounded, self.say = plan, places, deadline, rounded, say
        self.share = share
        self.sources = places.sources(plan.scale)

    def count_missing(self, stage: str) -> int:
        """Fine-tuning runs or measurements of the plan that are not there."""
        runs = self.places.runs
        if stage == "finetune":
            files = [one.folder(runs) / "result.json" for one in self.plan.tuned()]
        else:
            files = [one.file(runs) for one in self.plan.measured()]
        return sum(not file.exists() for file in files)

    def do(self, stage: str) -> None:
        from saobp.lab.pretraining import pretrain_all
        from saobp.lab.sharing import share_of, weight_of
        from saobp.lab.stages import finetune_all, measure_all

        plan, runs, sources, say, deadline = (
            self.plan, self.places.runs, self.sources, self.say, self.deadline,
        )  # fmt: skip
        result: StageResult | None = None
        if stage == "tokens":
            for recipe in {model.recipe.family: model.recipe for model in plan.trained()}.values():
                found = sources.texts(recipe)
                say(f"{recipe.family}: {', '.join(found.train.stores)} in {self.places.tokens}")
        elif stage == "pretrain":
            models = share_of(plan.trained(), *self.share, lambda model: model.method.cost)
            result = pretrain_all(models, runs, sources, deadline=deadline, rounded=self.rounded, say=say)
        elif stage == "finetune":
            tuned = share_of(plan.tuned(), *self.share, lambda one: weight_of(one.task))
            result = finetune_all(tuned, runs, sources, deadline=deadline, say=say)
        elif stage == "measure":
            measured = share_of(plan.measured(), *self.share)
            result = measure_all(measured, runs, sources, deadline=deadline, say=say)
        elif stage == "tabulate":
            from saobp.lab.tabulate import tabulate

            for path in tabulate(plan, runs, self.places.out):
                say(f"wrote {path}")
            self.write_page()
        if result is not None:
            say(f"{stage}: {result}")

    def write_page(self) -> None:
        """The page to look at: the claims, and curves and heads of the runs that are finished."""
        from saobp.report.library import MissingPlotlyError
        from saobp.report.reproduction import write_reproduction

        folders = [model.folder(self.places.runs) for model in self.plan.trained()]
        finished = [folder for folder in folders if (folder / "result.json").exists()]
        if finished:
            targets = [experiment.name for experiment in self.plan.experiments]
            try:
                page = write_reproduction(finished, self.places.out, targets, self.plan.scale.name)
            except MissingPlotlyError as problem:
                self.say(str(problem))
            else:
                self.say(f"the page: {page}")


def _side_by_side(stage: str, jobs: int, places: _Places, deadline: Deadline) -> None:
    """The same command in several processes, each with its share of one stage; the last options win."""
    from saobp.training.finetune.jobs import run_jobs

    place = sys.argv.index("reproduce")
    given = [*sys.argv[place:], f"--stage={stage}", "--jobs=1", f"--runs={places.runs}"]
    given += [f"--minutes={max(deadline.left, 1) / 60}"] if deadline.left < float("inf") else []
    commands = {
        f"{stage}-{number}": [sys.executable, "-m", "saobp", *given, f"--share={number}/{jobs}"]
        for number in range(1, jobs + 1)
    }
    codes = run_jobs(commands, jobs, places.runs / "logs", lambda *_: None)
    failed = [name for name, code in codes.items() if code]
    if failed:
        raise ValueError(f"{', '.join(failed)} failed; the last words are in {places.runs / 'logs'}")


def parse_share(text: str) -> tuple[int, int]:
    """``2/4`` is the second of four shares."""
    part, slash, whole = text.partition("/")
    if not slash or not part.isdecimal() or not whole.isdecimal() or not 1 <= int(part) <= int(whole):
        raise ValueError(f"a share is written as in 1/4, not {text!r}")
    return int(part), int(whole)


def _list(console: Console) -> None:
    from saobp.lab import EXPERIMENTS

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("target", "kind", "what"):
        table.add_column(name)
    for one in EXPERIMENTS.values():
        table.add_row(one.name, one.kind, one.title)
    console.print(table)


def _show_plan(console: Console, plan: Plan, places: _Places, stages: list[str]) -> None:
    """Runs with their state and what is expected of those to come."""
    from saobp.lab.estimates import Estimates, disk_bytes
    from saobp.training.runs import RunFolder

    models = plan.trained()
    estimates = Estimates(places.runs)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("run", "state", "seconds"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    open_, total = [], 0.0
    for model in models:
        run = RunFolder(model.folder(places.runs))
        state = "finished" if run.is_finished else "begun" if run.checkpoint_steps() else "to do"
        seconds = 0.0 if run.is_finished else estimates.seconds(model)
        total += seconds
        open_ += [] if run.is_finished else [model]
        table.add_row(model.name, state, f"{seconds:.0f}" if seconds else "")
    console.print(table)
    tuned = [one for one in plan.tuned() if not (one.folder(places.runs) / "result.json").exists()]
    measured = [one for one in plan.measured() if not one.file(places.runs).exists()]
    words = (
        f"{len(open_)} of {len(models)} models to pretrain, about {total / 60:.0f} minutes and "
        f"{disk_bytes(open_) / 1e9:.1f} GB on {estimates.hardware}; {len(tuned)} fine-tuning runs"
        f"{_tuning_minutes(tuned) if plan.scale.rows is None and estimates.cuda else ''} and "
        f"{len(measured)} measurements to do. Stages: {', '.join(stages)}."
    )
    console.print(Text(words), soft_wrap=True)


def _tuning_minutes(tuned: list[Tuned]) -> str:
    """What fine-tuning is expected to take on a large GPU."""
    from saobp.lab.sharing import STEP_SECONDS, weight_of

    minutes = STEP_SECONDS * sum(weight_of(one.task) for one in tuned) / 60
    return f" (about {minutes:.0f} minutes in one process, less with --jobs)"

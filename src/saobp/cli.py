"""The command ``saobp``: one file of ``saobp/commands`` per subcommand."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from saobp.commands.arena import arena
from saobp.commands.bench import bench
from saobp.commands.diagnose import diagnose
from saobp.commands.evaluate import evaluate
from saobp.commands.explore import explore
from saobp.commands.export import export
from saobp.commands.finetune import finetune
from saobp.commands.pretrain import pretrain
from saobp.commands.quickstart import quickstart
from saobp.commands.report import report
from saobp.commands.reproduce import reproduce
from saobp.commands.streams import fail
from saobp.commands.tokenize import tokenize
from saobp.extras import MissingPackageError, named
from saobp.runs.worker_processes import end_with_parent
from saobp.version import __version__

WHOLE_PIPELINE = ("quickstart", "reproduce", "arena")
"""Commands that train and draw, and so need the packages of both."""


class Commands(TyperGroup):
    """Says in a sentence which extra a command needs where packages are missing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as problem:
            command = ctx.invoked_subcommand
            found = named(problem, f"saobp {command}", "lab" if command in WHOLE_PIPELINE else None)
            if isinstance(found, MissingPackageError):
                fail(found)
            raise


app = typer.Typer(
    cls=Commands,
    help="Attention refined by belief propagation, and instruments for attention health.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command()(quickstart)
app.command()(diagnose)
app.command()(tokenize)
app.command()(pretrain)
app.command()(finetune)
app.command()(evaluate)
app.command()(export)
app.command()(report)
app.command()(explore)
app.command()(reproduce)
app.command()(arena)
app.add_typer(bench, name="bench")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"saobp {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option("--version", help="Tell the version and end.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Attention refined by belief propagation, and instruments for attention health."""
    end_with_parent()

"""``saobp arena``: compare methods on existing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saobp.commands.streams import fail, print_result


def arena(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that collect them.")],
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("results"),
    fresh: Annotated[
        list[str] | None,
        typer.Option(
            help="Seeds that confirm a choice made on others, compared apart: 6,7,8. After a colon the pairs "
            "that a verdict needs, if more than five: 51,52,53,54,55,56:6. May be repeated."
        ),
    ] = None,
) -> None:
    """Compare pretraining runs with plain attention of the same recipe and seed: a page and a forest plot."""
    try:
        absent = [str(folder) for folder in runs if not folder.is_dir()]
        if absent:
            raise ValueError(f"there is no folder {absent[0]}")
        from saobp.lab.arena import write_arena
        from saobp.lab.arena_records import FreshSeeds

        written = write_arena(runs, out, [FreshSeeds.of(seeds) for seeds in fresh or ()])
    except (ValueError, OSError) as problem:
        fail(problem)
    for path in written:
        print_result(f"wrote {path}")

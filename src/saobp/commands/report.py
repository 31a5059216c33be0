"""``saobp report``: one page, or figures, from run folders."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from saobp.commands.import_option import Imports, import_user_code
from saobp.commands.streams import fail, print_result
from saobp.extras import MissingPackageError
from saobp.runs.layout import is_run, run_folders
from saobp.storage.places import check_can_write


class Format(StrEnum):
    """Output format of a report."""

    html = "html"
    svg = "svg"
    pdf = "pdf"
    png = "png"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or diagnoses; several are overlaid.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page; by default report.html in the folder of one run, or here for several. "
            "With --format a folder; by default figures there."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a page or figures of that name.")
    ] = False,
    form: Annotated[
        Format, typer.Option("--format", help="A page, or figures for papers and slides.")
    ] = Format.html,
    sentence: Annotated[
        list[str] | None,
        typer.Option(help="Run the saved model of every run on this sentence, for the explorer. May repeat."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    imports: Imports = None,
) -> None:
    """Write a page to look at: curves, heads, verdicts, and an explorer where a run has one."""
    base = runs[0] if len(runs) == 1 else Path()
    try:
        if form is not Format.html and (sentence or title):
            raise ValueError(f"--sentence and --title are for a page; figures as {form.value} have neither")
        for folder in runs:
            if not folder.is_dir():
                raise ValueError(f"there is no folder {str(folder)!r} with a run")
            if not is_run(folder) and run_folders(folder) == [folder]:
                raise ValueError(f"{str(folder)!r} holds no run and no diagnosis")
        import_user_code(imports)
        page = (out or base) / "report.html" if (out or base).is_dir() else out or base
        if form is Format.html and page.exists() and not overwrite:
            raise ValueError(f"{page} is there: name another file by --out, or add --overwrite to replace it")
        place = page.parent if form is Format.html else out or base / "figures"
        check_can_write(place, "name another place by --out")
        if sentence:
            _explore(runs, sentence)
        if form is Format.html:
            from saobp.report import write_report

            written = [write_report(runs, page, title=title)]
        else:
            from saobp.report.static_figures import write_figures

            written = write_figures(runs, out or base / "figures", form.value, overwrite=overwrite)
    except (ValueError, OSError, MissingPackageError) as problem:
        fail(problem)
    for path in written:
        print_result(f"wrote {path}")


def _explore(runs: list[Path], sentences: list[str]) -> None:
    """Write ``explorer.json`` to every run, from its saved model; to none if that fails for one."""
    from saobp.metrics.diagnosis.loading import load_model
    from saobp.report import explorer_data, write_explorer
    from saobp.runs.layout import MODEL, run_folders, seed_folders

    explorers = []
    for run in (run_folder for folder in runs for run_folder in run_folders(folder)):
        folders = [run / MODEL, *(seed / MODEL for seed in seed_folders(run))]
        saved = next((folder for folder in folders if folder.is_dir()), None)
        if saved is None:
            raise ValueError(f"{str(run)!r} holds no folder 'model', so there is no model for the sentences")
        model, tokenizer = load_model(str(saved))
        explorers.append((explorer_data(model, tokenizer, sentences, subject=run.resolve().name), run))
    for explorer, run in explorers:
        write_explorer(explorer, run)

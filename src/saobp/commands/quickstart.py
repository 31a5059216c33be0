"""``saobp quickstart``: the pipeline from text to page, in miniature and offline."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from saobp.commands.import_option import Imports, import_user_code
from saobp.commands.streams import fail, print_note, print_result, stdout_console
from saobp.progress import ProgressBars
from saobp.storage.places import check_can_write

if TYPE_CHECKING:
    from saobp.metrics.diagnosis.diagnose import Diagnosis
    from saobp.refinement import Refinement
    from saobp.training.pretrain import Result

STEPS = 1000
SECONDS = 42.0
"""Time budget of each of the two runs; slow machines take fewer steps."""
HELD_OUT = "held_out.txt"
"""Marks the folder of an earlier quickstart, whose other entries may be replaced."""


def quickstart(
    refinement: Annotated[
        str, typer.Option(help="For instance high:learned, high:0.2 or low:0.5.")
    ] = "high:learned",
    sentence: Annotated[
        str | None, typer.Option(help="Draw the attention on this sentence instead of held-out ones.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page, the runs and the text.")] = Path(
        "quickstart"
    ),
    portable: Annotated[
        bool, typer.Option("--portable", help="Save code with the refined model: it loads without saobp.")
    ] = False,
    imports: Imports = None,
) -> None:
    """Train a tiny model twice, plain and refined, diagnose both, and write a page to compare them."""
    try:
        import_user_code(imports)
        page = run(refinement, sentence, out, steps=STEPS, seconds=SECONDS, portable=portable)
    except (ValueError, OSError) as problem:
        fail(problem)
    if page is not None:
        print_result(f"the page: {page.resolve()}")


def run(
    refinement: str,
    sentence: str | None,
    out: Path,
    *,
    steps: int,
    seconds: float,
    portable: bool = False,
) -> Path | None:
    """Read, tokenise, train twice, diagnose and write; returns the page, or None where plotly is missing."""
    from saobp.commands.diagnose import show as show_heads
    from saobp.quickstart import pipeline, prose
    from saobp.report.page_assets import MissingPlotlyError
    from saobp.training.pretrain import pretrain

    parsed = _checked(refinement, out)
    with staged(out) as new:
        with ProgressBars() as bars:
            paragraphs = prose.read_prose(bars.add("reading Python's documentation"))
            recipe = pipeline.recipe_of(steps)
            bar = bars.add("learning a vocabulary, tokenising")
            texts = pipeline.prepare(paragraphs, new / "text", recipe.length, bar)
        sentences = pipeline.choose_sentences(texts.tokenizer, texts.held_out, sentence)
        refined = replace(recipe, refinement=parsed)
        fitting = pipeline.fitting_steps(refined, texts, seconds)
        recipes = {"plain": pipeline.recipe_of(fitting)}
        recipes[parsed.factor] = replace(recipes["plain"], refinement=parsed)
        runs = {name: new / name for name in recipes}
        ended: dict[str, Result] = {}
        for name, run_recipe in recipes.items():
            shape = f"{run_recipe.batch_size} x {run_recipe.length}"
            print_note(f"training {name}: {run_recipe.steps:,} steps of {shape} tokens")
            ended[name] = pretrain(
                run_recipe,
                runs[name],
                train=texts.train,
                validation=texts.validation,
                tokenizer=texts.tokenizer,
                portable=portable and run_recipe.refinement is not None,
                notify=print_note,
            )
        with ProgressBars() as bars:
            diagnoses = pipeline.diagnose_runs(runs, sentences, bars.add("looking at both"))
        has_page = True
        try:
            pipeline.write_page(runs, ended, diagnoses, texts, parsed, sentences[0], new / "index.html")
        except MissingPlotlyError as problem:
            has_page = False
            print_note(str(problem))
        (new / HELD_OUT).write_text("\n\n".join(texts.held_out) + "\n", encoding="utf-8")
    show_heads(stdout_console(), diagnoses)
    show_numbers(ended, diagnoses)
    print_result(f"next: saobp explore {out / parsed.factor / 'model'}")
    return out / "index.html" if has_page else None


def _checked(refinement: str, out: Path) -> Refinement:
    """The refinement, if it is one and ``out`` is new or of an earlier quickstart; else ValueError."""
    from saobp.commands.refinement_option import parse_refinement_option

    parsed = parse_refinement_option(refinement)
    if parsed.is_plain:
        raise ValueError(
            "the quickstart compares plain attention with a refinement: name one, as in high:learned"
        )
    check_can_write(out, "name another folder by --out")
    for name in ("text", "plain", parsed.factor, "index.html"):
        if (out / name).exists() and not (out / HELD_OUT).exists():
            raise ValueError(f"{out / name} is there and of no quickstart: name another folder by --out")
    return parsed


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Context with a temporary folder, whose entries are moved to ``out`` when all are complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.writing-") as name:
        new = Path(name, "new")
        new.mkdir()
        yield new
        out.mkdir(exist_ok=True)
        for entry in sorted(new.iterdir()):
            target = out / entry.name
            if target.is_dir():
                target.rename(Path(name, "old"))
            entry.replace(target)
            shutil.rmtree(Path(name, "old"), ignore_errors=True)


def show_numbers(ended: dict[str, Result], diagnoses: Sequence[Diagnosis]) -> None:
    """Print the means of both runs."""
    from saobp.quickstart.pipeline import numbers

    table = Table(title="held-out text, means over heads", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ended:
        table.add_column(Text(name), justify="right")
    for name, values in numbers(ended, diagnoses):
        table.add_row(name, *(f"{value:.3f}" for value in values))
    stdout_console().print(table)

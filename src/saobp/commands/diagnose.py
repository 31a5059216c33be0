"""``saobp diagnose``: the attention health of a model on some texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from saobp.commands.import_option import Imports, import_user_code
from saobp.commands.streams import (
    AsJson,
    fail,
    has_options,
    print_json,
    print_note,
    stderr_console,
    stdout_console,
)
from saobp.progress import ProgressBar, ProgressBars
from saobp.runs.layout import DIAGNOSIS
from saobp.storage.model_folders import check_file, checked_folder
from saobp.storage.places import check_can_write

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from saobp.metrics.diagnosis.diagnose import Diagnosis
    from saobp.metrics.diagnosis.head_kinds import Kind
    from saobp.metrics.health.head_health import HeadHealth
    from saobp.metrics.health.verdicts import Verdict

HEADS_PER_TABLE = 8
NAMED_HEADS = 5
EXPLANATION = """\
[bold]saobp diagnose[/] measures every attention head of a model on your texts
and says which collapse.

  saobp diagnose --example                        a synthetic model; runs offline
  saobp diagnose FOLDER --text FILE               texts split at blank lines
  saobp diagnose FOLDER --dataset NAME            texts of a dataset
  saobp diagnose FOLDER --text FILE --compare high:0.2

It prints a table of layers and heads, and writes JSON, CSV, figures and a
page to the folder of --out. [bold]saobp diagnose --help[/] lists the options."""
MARKS: dict[Verdict, tuple[str, str]] = {
    "localised": ("▼", "red"),
    "diffuse": ("▲", "blue"),
    "sink": ("●", "yellow"),
    "undefined": ("?", "magenta"),
    "healthy": ("", "green"),
    "borderline": ("", ""),
}


def diagnose(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Folder of a run or of a saved model, or a name on the hub.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="File of texts, split at blank lines, or else at line ends.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset by name or folder.")] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    column: Annotated[str | None, typer.Option(help="Column of the dataset; default: first of text.")] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Another model, or a refinement such as high:0.2; may be given several times."),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many texts.", min=1)] = 64,
    length: Annotated[int | None, typer.Option(help="Cut texts to so many tokens.", min=2)] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 8,
    method: Annotated[str, typer.Option(help="auto, exact or sampled.")] = "auto",
    full: Annotated[bool, typer.Option("--full", help="Also sparsity, clustering, betweenness.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("diagnosis"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results in that folder.")
    ] = False,
    example: Annotated[
        bool, typer.Option("--example", help="Use a synthetic model, whose heads have known patterns.")
    ] = False,
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Measure every attention head of a model and say which collapse."""
    if not has_options(context):
        stdout_console().print(EXPLANATION)
        return
    try:
        if model is None and not example:
            raise ValueError("name a model: saobp diagnose FOLDER --text FILE, or saobp diagnose --example")
        if text is not None:
            check_file(text)
        if model is not None:
            checked_folder(model)
        check_can_write(out, "name another folder by --out")
        if (out / DIAGNOSIS).exists() and not overwrite:
            raise ValueError(
                f"{out} holds a diagnosis: name another by --out, or add --overwrite to replace it"
            )
        if full and method == "sampled":
            raise ValueError("--full needs whole maps, which --method sampled does not form: leave one out")
        import_user_code(imports)
        from saobp.metrics.diagnosis.loading import EXAMPLE, EXAMPLE_TEXT, dataset_texts, read_texts

        if text is not None and dataset is not None:
            raise ValueError("give texts by --text or by --dataset, not by both")
        if text is not None:
            texts = read_texts(text, limit)
        elif dataset is not None:
            texts = dataset_texts(dataset, split, column, limit)
        elif example:
            texts = [EXAMPLE_TEXT]
        else:
            raise ValueError("there is nothing to read: give texts by --text FILE or --dataset NAME")
        subjects = _subjects(EXAMPLE if model is None else model, compare or [])
        diagnoses, explorer = _diagnoses(stderr_console(), subjects, texts, length, batch_size, method, full)
        written = _write(diagnoses, out, texts[0], explorer)  # before anything is printed, which may fail
        if as_json:
            print_json([diagnosis.to_dict() for diagnosis in diagnoses])
        else:
            show(stdout_console(), diagnoses)
        console = stderr_console() if as_json else stdout_console()
        console.print(Text(f"wrote {', '.join(path.name for path in written)} to {out}"), soft_wrap=True)
    except (ValueError, OSError) as problem:
        fail(problem)


def _subjects(model: str, compare: Sequence[str]) -> list[tuple[str, str | None]]:
    """Models with the refinement to apply to each, or None. Raises before anything is measured."""
    from saobp.commands.refinement_option import parse_refinement_option
    from saobp.metrics.diagnosis.loading import is_refinement

    subjects: list[tuple[str, str | None]] = [(model, None)]
    for other in compare:
        if is_refinement(other):
            parse_refinement_option(other)
            subjects.append((model, other))
        else:
            checked_folder(other)
            subjects.append((other, None))
    return subjects


def _diagnoses(
    console: Console,
    subjects: Sequence[tuple[str, str | None]],
    texts: list[str],
    length: int | None,
    batch_size: int,
    method: str,
    full: bool,
) -> tuple[list[Diagnosis], dict[str, Any] | None]:
    """Diagnoses of the subjects, and the explorer data of the first."""
    from saobp.metrics.diagnosis.diagnose import diagnose as measured
    from saobp.metrics.diagnosis.loading import load_model
    from saobp.metrics.health.head_health import CROSS_LAYER
    from saobp.metrics.query_key_statistics import STATISTICS
    from saobp.metrics.sampling import SAMPLED
    from saobp.portable.code import refinement_of
    from saobp.refinement import Refinement

    saved: Refinement | None = None
    diagnoses: list[Diagnosis] = []
    explorer: dict[str, Any] | None = None
    statistics = [*(STATISTICS if full else SAMPLED), *([] if method == "sampled" else [CROSS_LAYER])]
    with ProgressBars(console) as bars:
        for name, refinement in subjects:
            subject = name if refinement is None else f"{name} with {refinement}"
            advance = _adding_up(bars.add(subject), len(texts))
            requested = None if refinement is None else Refinement.parse(refinement)
            loaded, tokenizer = load_model(name, requested)
            if not diagnoses:  # the model that refinements are applied to
                saved = refinement_of(loaded)
            elif requested is not None and requested == saved:
                print_note(
                    f"{name} has {refinement} already, so both tables are alike: name another by --compare"
                )
            elif requested is not None and requested.is_learned:
                print_note(
                    f"learned strengths start at 0, so {name} with {refinement} is the plain model: name a "
                    "strength, as in high:1"
                )
            diagnoses.append(
                measured(
                    loaded,
                    tokenizer,
                    texts,
                    subject=subject,
                    statistics=statistics,
                    method="exact" if full and method == "auto" else method,
                    length=length,
                    batch_size=batch_size,
                    progress=advance,
                    note=print_note,
                )
            )
            if len(diagnoses) == 1:
                explorer = _explorer(console, loaded, tokenizer, texts, length, subject)
    return diagnoses, explorer


def _adding_up(bar: ProgressBar, total: int) -> Callable[[float], None]:
    """Callback with the number of further texts done, in parts."""
    done = 0.0

    def advance(more: float) -> None:
        nonlocal done
        done += more
        bar(done, total)

    return advance


def _explorer(
    console: Console,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    length: int | None,
    subject: str,
) -> dict[str, Any] | None:
    """Explorer data of the first texts; None, with a printed reason, if that fails."""
    from saobp.report.explorer import MAX_SENTENCES, MAX_TOKENS, explorer_data

    room = min(MAX_TOKENS, length or MAX_TOKENS)
    try:
        return explorer_data(model, tokenizer, texts[:MAX_SENTENCES], max_tokens=room, subject=subject)
    except ValueError as problem:
        console.print(Text(f"the page has no explorer: {problem}"), soft_wrap=True)
        return None


def show(console: Console, diagnoses: Sequence[Diagnosis]) -> None:
    """Print GTD by layer and head, marking collapsed heads, their count, and heads of known kinds."""
    from saobp.metrics.diagnosis.head_kinds import KINDS

    most = max(1 + head.head for diagnosis in diagnoses for head in diagnosis.heads)
    for first in range(0, most, HEADS_PER_TABLE):
        tables = [_table(diagnosis, first) for diagnosis in diagnoses]
        console.print(Columns([table for table in tables if table is not None], padding=(0, 3)))
    for diagnosis in diagnoses:
        counts = [
            f"{diagnosis.count(verdict)} {verdict} {mark}".strip()
            for verdict, (mark, _) in MARKS.items()
            if diagnosis.count(verdict)
        ]
        heads = len(diagnosis.heads)
        words = f"{diagnosis.subject}: {heads} head{'s' if heads > 1 else ''}, {', '.join(counts)}"
        console.print(Text(words), soft_wrap=True)
        known = [_format_heads(kind, diagnosis.of_kind(kind)) for kind in KINDS if diagnosis.of_kind(kind)]
        if known:
            console.print(Text(f"known kinds (layer.head): {'; '.join(known)}"), soft_wrap=True)


def _format_heads(kind: Kind, heads: Sequence[HeadHealth]) -> str:
    """``3 induction 5.1, 6.0, 9.2``, the clearest heads first."""
    named = ", ".join(f"{head.layer}.{head.head}" for head in heads[:NAMED_HEADS])
    return f"{len(heads)} {kind} {named}" + (", …" if len(heads) > NAMED_HEADS else "")


def _table(diagnosis: Diagnosis, first: int) -> Table | None:
    last = min(first + HEADS_PER_TABLE, 1 + max(head.head for head in diagnosis.heads))
    if first >= last:
        return None
    title = Text(f"GTD by layer and head: {diagnosis.subject}", overflow="fold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right")
    for head in range(first, last):
        table.add_column(str(head), justify="right")
    if diagnosis.across_layers:
        table.add_column("across\nlayers", justify="right")
    for layer in range(diagnosis.layers):
        cells = {head.head: _cell(head) for head in diagnosis.layer(layer)}
        row = [cells.get(head, Text("")) for head in range(first, last)]
        if diagnosis.across_layers:
            value = diagnosis.across_layers.get(layer)
            row.append(Text("" if value is None else f"{value:.2f}"))
        table.add_row(str(layer), *row)
    return table


def _cell(head: HeadHealth) -> Text:
    mark, style = MARKS[head.verdict]
    return Text(f"{head.values['gtd']:.2f}{mark or ' '}", style=style)


def _write(
    diagnoses: Sequence[Diagnosis], out: Path, sample: str, explorer: dict[str, Any] | None
) -> list[Path]:
    from saobp.extras import MissingPackageError
    from saobp.report.diagnosis_page import write_diagnosis, write_diagnosis_figures, write_diagnosis_page

    written = write_diagnosis(diagnoses, out, explorer)
    try:
        written += write_diagnosis_figures(diagnoses, out)
        written.append(write_diagnosis_page(diagnoses, out, sample))
    except MissingPackageError as problem:
        print_note(str(problem))
    return written

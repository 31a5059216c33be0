"""``saobp quickstart``."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from saobp.quickstart.comparison import Comparison

STEPS = 2000
SECONDS = 90.0
HELD_OUT = 300
HEADS_SHOWN = 3
BAR_CELLS = 20


def quickstart(
    refinement: Annotated[
        str, typer.Option(help="For instance high:1, low:0.5 or high:1,steps=2.")
    ] = "high:1",
    sentence: Annotated[
        str | None, typer.Option(help="Draw this sentence instead of a held-out one.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page, the pictures and the model.")] = Path(
        "quickstart"
    ),
) -> None:
    """Refine a small model's attention on real text and draw it before and after."""
    console = Console()
    try:
        page = run(console, refinement, sentence, out, steps=STEPS, seconds=SECONDS)
    except (ValueError, OSError) as problem:
        console.print(Text(str(problem), style="red"), soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(Text(f"the page: {page.resolve()}"), soft_wrap=True)


def run(
    console: Console,
    refinement: str,
    sentence: str | None,
    out: Path,
    *,
    steps: int,
    seconds: float,
) -> Path:
    """Read, train, compare, draw and write; returns the page. Training stops at ``steps`` or ``seconds``."""
    import transformers

    import saobp
    from saobp.quickstart import comparison, page, pictures, prose, training
    from saobp.refinement import Refinement

    asked = Refinement.parse(refinement)
    if asked.is_learned:
        raise ValueError("the quickstart does not train with the refinement: give a strength, not 'learned'")
    transformers.utils.logging.disable_progress_bar()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TimeElapsedColumn(table_column=Column(min_width=7)),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bars:

        def stage(name: str) -> Callable[..., None]:
            task = bars.add_task(name, total=1.0, note="")
            return lambda done, note="": bars.update(task, completed=done, note=note)

        texts = prose.read_prose(stage("reading Python's documentation"))
        held_out, seen = texts[:HELD_OUT], texts[HELD_OUT:]

        tell = stage("training a vocabulary")
        tokenizer = training.train_tokenizer(seen)
        lines, unseen = training.pack(tokenizer, seen), training.pack(tokenizer, held_out)
        sentence = comparison.choose_sentence(tokenizer, held_out) if sentence is None else sentence
        ids = comparison.encode(tokenizer, sentence)
        tell(1.0, f"{len(tokenizer):,} word pieces, {lines.numel():,} tokens")

        tell = stage("training a small model")
        model = training.new_model()
        saobp.remove(saobp.apply(model, asked))
        start = time.monotonic()
        taken = training.train(
            model,
            lines,
            steps=steps,
            seconds=seconds,
            progress=lambda done, loss: tell(done, f"loss {loss:.2f}"),
        )
        trained = time.monotonic() - start
        tell(1.0, f"{taken:,} steps")

        tell = stage("refining its attention")
        found = comparison.compare(model, tokenizer, sentence, ids, unseen, refinement, tell)

        tell = stage("drawing")
        maps = page.png(pictures.draw_maps(found, found.most_moved_heads(HEADS_SHOWN)))
        tell(0.5)
        dots = page.png(pictures.draw_heads(found))
        written = page.render_page(
            found,
            maps,
            dots,
            parameters=model.num_parameters(),
            characters=sum(map(len, seen)),
            steps=taken,
            seconds=trained,
            lines=len(unseen),
            shown=HEADS_SHOWN,
            factor=asked.factor,
            folder=out,
            length=training.LENGTH,
        )
        with staged(out) as stage_folder:
            model.save_pretrained(stage_folder / "model")
            tokenizer.save_pretrained(stage_folder / "model")
            (stage_folder / "held_out.txt").write_text("\n\n".join(held_out) + "\n", encoding="utf-8")
            (stage_folder / "maps.png").write_bytes(maps)
            (stage_folder / "heads.png").write_bytes(dots)
            (stage_folder / "index.html").write_text(written, encoding="utf-8")
        tell(1.0)
    show(console, found)
    return out / "index.html"


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder to write into, whose entries take their place in ``out`` when all are complete."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".writing-") as name:
        new = Path(name, "new")
        new.mkdir()
        yield new
        for entry in sorted(new.iterdir()):
            target = out / entry.name
            if target.is_dir():
                target.rename(Path(name, "old"))
            entry.replace(target)
            shutil.rmtree(Path(name, "old"), ignore_errors=True)


def show(console: Console, found: Comparison) -> None:
    """Print the row that moved most, and the numbers."""
    from saobp.quickstart.page import numbers

    layer, head, row = found.most_moved_row()
    old, new = (look.rows[layer, head, row].tolist() for look in (found.before, found.after))
    largest = max(*old, *new)
    console.print(Text(f"\n“{found.sentence}”"), soft_wrap=True)
    rows = Table(
        title=Text(f"where “{found.tokens[row]}” looks (layer {layer}, head {head})"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    rows.add_column("token")
    rows.add_column("softmax", justify="right")
    rows.add_column("", width=BAR_CELLS)
    rows.add_column(Text(found.refinement), justify="right")
    rows.add_column("", width=BAR_CELLS)
    for token, one, other in zip(found.tokens, old, new, strict=True):
        before, after = ("█" * round(BAR_CELLS * weight / largest) for weight in (one, other))
        rows.add_row(Text(token), f"{one:.3f}", Text(before), f"{other:.3f}", Text(after))
    console.print(rows)
    table = Table(title="all heads, held-out text", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("mean of")
    table.add_column("softmax", justify="right")
    table.add_column(Text(found.refinement), justify="right")
    for name, one, other in numbers(found):
        table.add_row(name, f"{one:.3f}", f"{other:.3f}")
    console.print(table)

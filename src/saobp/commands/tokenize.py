"""``saobp tokenize``: text to token stores, as ``saobp pretrain`` does it before it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from saobp.data import TokenStore


def tokenize(
    corpus: Annotated[
        str, typer.Argument(help="Folder, file, or name in --data-dir or on the hub; several with commas.")
    ],
    tokenizer: Annotated[
        str, typer.Option(help="bert, gpt2, a folder, a name on the hub, or train:SIZE.")
    ] = "bert",
    out: Annotated[Path, typer.Option(help="Folder for the token stores.")] = Path("tokens"),
    data_dir: Annotated[Path | None, typer.Option(help="Folder with corpora and tokenizers.")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes; default: one per core.", min=1)] = None,
) -> None:
    """Tokenise corpora once, in parallel, into memory-mapped files that training reuses."""
    console = Console()
    try:
        from saobp.data import parse_mixture

        names = parse_mixture(corpus)
        chosen = obtain_tokenizer(tokenizer, names, out, data_dir)
        stores = with_bars(console, names, chosen, out, data_dir=data_dir, processes=processes)
    except (ValueError, TypeError, OSError) as problem:
        console.print(Text(str(problem), style="red"), soft_wrap=True)
        raise typer.Exit(1) from None
    for name, store in stores.items():
        said = store.description
        console.print(
            Text(f"{name}: {said.documents:,} documents, {said.tokens:,} tokens in {store.folder}"),
            soft_wrap=True,
        )


def obtain_tokenizer(
    name: str, corpora: Mapping[str, float | None], out: Path, data_dir: Path | None
) -> PreTrainedTokenizerFast:
    """A tokenizer by name; ``train:SIZE`` learns a WordPiece one from the corpora.

    Both that and the two of the families are left in ``out``: the folder is then all that training needs.
    """
    from saobp.data import Documents, load_tokenizer, open_corpus, train_vocabulary

    if not name.startswith("train:"):
        found = load_tokenizer(name, data_dir)
        if name in ("bert", "gpt2"):
            _leave(found, out / f"tokenizer-{name}")
        return found
    size = name.removeprefix("train:")
    if not size.isdecimal():
        raise ValueError(f"a tokenizer to train is written train:SIZE, as in train:8192, not {name!r}")
    opened = tuple(open_corpus(corpus, data_dir) for corpus in corpora)
    trained = train_vocabulary(Documents(opened), int(size))
    _leave(trained, out / f"tokenizer-{size}")
    return trained


def _leave(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's folder whole or not at all."""
    from saobp.data.vocabulary import save_tokenizer
    from saobp.data.writing import only_one, replacing

    with only_one(folder), replacing(folder) as new:
        save_tokenizer(tokenizer, new)


def with_bars(
    console: Console,
    corpora: Mapping[str, float | None],
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    *,
    data_dir: Path | None = None,
    processes: int | None = None,
) -> dict[str, TokenStore]:
    """Prepare the stores of a mixture with a progress bar for each corpus."""
    from saobp.data import prepare_corpora

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:

        def bar(name: str) -> Callable[[int, int], object]:
            task = bars.add_task(f"tokenising {escape(name)}", total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        return prepare_corpora(corpora, tokenizer, out, data_dir=data_dir, processes=processes, progress=bar)

"""``saobp tokenize``: text to token stores, as ``saobp pretrain`` does it before it trains."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saobp.commands.streams import check_data_dir, fail, print_result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from saobp.data.token_store import Progress


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
    try:
        from saobp.data import parse_mixture, prepare_corpora
        from saobp.progress import ProgressBars

        names = parse_mixture(corpus)
        check_data_dir(data_dir)
        with ProgressBars() as bars:
            chosen = obtain_tokenizer(tokenizer, names, out, data_dir, bars.add)
            stores = prepare_corpora(
                names, chosen, out, data_dir=data_dir, processes=processes, progress=bars.add
            )
    except (ValueError, OSError) as problem:
        fail(problem)
    for name, store in stores.items():
        facts = store.metadata
        print_result(f"{name}: {facts.documents:,} documents, {facts.tokens:,} tokens in {store.folder}")


def obtain_tokenizer(
    name: str,
    corpora: Collection[str],
    out: Path,
    data_dir: Path | None,
    progress: Callable[[str], Progress] | None = None,
) -> PreTrainedTokenizerFast:
    """A tokenizer by name; ``train:SIZE`` learns a WordPiece one from the corpora.

    That one and the families' own are saved in ``out``, so that training needs no other folder.
    """
    from saobp.data.tokenizer_store import (
        named_tokenizer,
        save_family_tokenizer,
        size_to_train,
        trained_tokenizer,
    )

    size = size_to_train(name)
    if size is not None:
        return trained_tokenizer(out, "bert", size, corpora, data_dir=data_dir, progress=progress)
    tokenizer = named_tokenizer(name, out, data_dir)
    return save_family_tokenizer(tokenizer, out, name) if name in ("bert", "gpt2") else tokenizer

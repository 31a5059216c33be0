"""Raw text to packed tokens against datasets.map: python benchmarks/tokenise.py --data-dir FOLDER"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from saobp.benchmarking.tokenise import tokenise_speed


def main(
    data_dir: Annotated[Path, typer.Option(help="Folder with corpora and tokenizers.")],
    corpora: Annotated[str, typer.Option(help="Corpora, joined by commas.")] = (
        "wikipedia_en,gutenberg_books,imdb_reviews"
    ),
    tokenizers: Annotated[str, typer.Option(help="bert, gpt2 or folders, joined by commas.")] = "bert,gpt2",
    megabytes: Annotated[float, typer.Option(help="Text taken from each corpus.")] = 40.0,
    turns: Annotated[int, typer.Option(help="How often each way runs.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the Markdown and CSV files.")] = Path(
        "benchmarks/results"
    ),
) -> None:
    """Measure, print a Markdown table, and write it."""
    table = tokenise_speed(
        data_dir,
        corpora=corpora.split(","),
        tokenizers=tokenizers.split(","),
        megabytes=megabytes,
        turns=turns,
        say=lambda line: Console(stderr=True).print(line),
    )
    table.write(out)
    print(table.markdown())


if __name__ == "__main__":
    typer.run(main)

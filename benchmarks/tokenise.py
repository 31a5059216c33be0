"""From raw text to packed blocks on one core: saobp's word cache, ``encode_batch_fast``, ``datasets.map``.

python benchmarks/tokenise.py --data-dir FOLDER
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import pyarrow
import pyarrow.parquet
import typer
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from saobp.benchmarking.table import BenchmarkTable
from saobp.data import Blocks, load_tokenizer, open_corpus, prefix_of, prepare_tokens, word_encoder
from saobp.data.corpora import Corpus
from saobp.runs.machine import machine, version

LENGTH = 128


def tokenise_speed(
    data_dir: Path,
    *,
    corpora: Sequence[str],
    tokenizers: Sequence[str],
    megabytes: float = 40.0,
    turns: int,
    notify: Callable[[str], object],
) -> BenchmarkTable:
    """CPU seconds of every method on the first ``megabytes`` of each corpus, interleaved."""
    facts = machine("cpu") | {name: version(name) for name in ("tokenizers", "datasets", "pyarrow")}
    title = f"Raw text to packed blocks of {LENGTH} tokens, one core"
    table = BenchmarkTable("tokenise", title, facts)
    ways = {"datasets.map": by_map, "encode_batch_fast": by_batches, "saobp": by_store}
    for name in corpora:
        with tempfile.TemporaryDirectory() as folder, _one_thread():
            text = Path(folder, "text.parquet")
            size = write_part(open_corpus(name, data_dir), text, megabytes)
            for kind in tokenizers:
                tokenizer = load_tokenizer(kind, data_dir)
                spent: dict[str, list[float]] = {way: [] for way in ways}
                tokens: dict[str, int] = {}
                for turn in range(turns):
                    for way, call in ways.items():
                        before = _processor_seconds()
                        tokens[way] = call(text, tokenizer, Path(folder, f"{kind}-{way}-{turn}"))
                        spent[way].append(_processor_seconds() - before)
                        notify(f"{name}, {kind}, {way}: {spent[way][-1]:.1f} s")
                for way in ways:
                    seconds = statistics.median(spent[way])
                    ratios = [a / b for a, b in zip(spent["datasets.map"], spent[way], strict=True)]
                    table.rows.append(
                        {
                            "corpus": name,
                            "MB": size / 1e6,
                            "tokenizer": kind,
                            "way": way,
                            "processor s": seconds,
                            "MB/s per core": size / 1e6 / seconds,
                            "million tokens/s per core": tokens[way] / 1e6 / seconds,
                            "times as fast": statistics.median(ratios),
                        }
                    )
    table.notes += [
        "All ways start from the same parquet file and end with blocks that can be read from disk. "
        "datasets.map: load_dataset, map(tokenise, batched), map(join and cut to blocks, batched), one "
        "process. saobp: prepare_tokens with one process, checksums included, and Blocks. "
        "encode_batch_fast: the same without the cache of words, every text through the tokenizer. No "
        "result is cached. All run the tokenizer on one thread; more threads or processes divide the time "
        "of each alike.",
        f"Medians of {turns} turns of processor time, all ways in each turn; loading Python is not "
        "counted. Processor time, because others may use the machine.",
    ]
    return table


def by_store(text: Path, tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """With the word cache; returns the number of packed tokens."""
    store = prepare_tokens(open_corpus(text), tokenizer, folder, processes=1)
    blocks = Blocks({"text": store}, length=LENGTH, prefix=prefix_of(tokenizer), held_out=0.0)
    assert blocks[0]["input_ids"].shape == (LENGTH,)
    return blocks.tokens


def by_batches(text: Path, tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """The same with ``encode_batch_fast`` of whole texts instead of the word cache."""
    with patch.object(word_encoder, "kind_of", lambda _: "whole"):
        return by_store(text, tokenizer, folder)


def by_map(text: Path, tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """As in Transformers' masked-LM example scripts; returns the number of packed tokens."""
    import datasets

    datasets.disable_progress_bars()

    def tokenise(rows: dict[str, list[str]]) -> Any:
        return tokenizer(rows["text"], return_special_tokens_mask=True)

    def cut(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain.from_iterable(lists)) for name, lists in rows.items()}
        end = len(joined["input_ids"]) // LENGTH * LENGTH
        return {
            name: [row[start : start + LENGTH] for start in range(0, end, LENGTH)]
            for name, row in joined.items()
        }

    rows: Any = datasets.load_dataset(
        "parquet", data_files=str(text), split="train", cache_dir=str(folder / "cache")
    )
    tokens = rows.map(
        tokenise, batched=True, remove_columns=["text"], cache_file_name=str(folder / "tokens.arrow")
    )
    blocks = tokens.map(cut, batched=True, cache_file_name=str(folder / "blocks.arrow"))
    assert len(blocks[0]["input_ids"]) == LENGTH
    return len(blocks) * LENGTH


def write_part(corpus: Corpus, file: Path, megabytes: float) -> int:
    """The first documents of a corpus as a parquet file; returns its bytes of text."""
    documents: list[str] = []
    size = 0
    for document in corpus.documents():
        documents.append(document)
        size += len(document.encode())
        if size >= megabytes * 1e6:
            break
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), file)
    return size


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tokenizers library on one thread."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _processor_seconds() -> float:
    """Of this process and its children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def main(
    data_dir: Annotated[Path, typer.Option(help="Folder with corpora and tokenizers.")],
    corpora: Annotated[str, typer.Option(help="Corpora, joined by commas.")] = (
        "wikipedia_en,gutenberg_books,imdb_reviews"
    ),
    tokenizers: Annotated[str, typer.Option(help="bert, gpt2 or folders, joined by commas.")] = "bert,gpt2",
    megabytes: Annotated[float, typer.Option(help="Text taken from each corpus.")] = 40.0,
    turns: Annotated[int, typer.Option(help="How often each way runs.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write Markdown and CSV files to this folder.")] = None,
) -> None:
    """Measure, and print a Markdown table."""
    table = tokenise_speed(
        data_dir,
        corpora=corpora.split(","),
        tokenizers=tokenizers.split(","),
        megabytes=megabytes,
        turns=turns,
        notify=lambda line: Console(stderr=True).print(line),
    )
    if out is not None:
        table.write(out)
    print(table.markdown())


if __name__ == "__main__":
    typer.run(main)

"""``saobp bench``: speed on the machine at hand, as tables and plots with the hardware in their header."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from saobp.commands.streams import AsJson, fail, print_json, stderr_console
from saobp.progress import OccasionalLines

if TYPE_CHECKING:
    from saobp.benchmarking.table import BenchmarkTable

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option(help="Write Markdown, CSV and PNG files to this folder, too.")]
Quick = Annotated[bool, typer.Option(help="Fewer lengths, versions and turns.")]
Listed = Annotated[str, typer.Option(help="Names or numbers joined by commas; all of them by default.")]


def _keep(table: BenchmarkTable, out: Path | None) -> None:
    """Write a table where ``--out`` says; without it, it is only shown."""
    if out is not None:
        table.write(out)


def _show(tables: Sequence[BenchmarkTable], width: int, as_json: bool) -> None:
    if as_json:
        print_json([asdict(table) for table in tables])
        return
    for table in tables:
        table.show(Console(width=width))


def _require_cuda(instead: str = "saobp bench cpu") -> None:
    import torch

    if not torch.cuda.is_available():
        fail(f"this benchmark needs a CUDA GPU and PyTorch finds none on this machine: try {instead}")


@bench.command()
def attention(
    out: Out = None,
    quick: Quick = False,
    lengths: Listed = "",
    memory: Annotated[bool, typer.Option(help="Measure the memory of training, too.")] = True,
    as_json: AsJson = False,
) -> None:
    """The fused operation against PyTorch's attention and the reference, by length."""
    from saobp.benchmarking.attention import COMPILED, LENGTHS, attention_speed, training_memory

    chosen = _numbers(lengths) or LENGTHS
    _require_cuda()
    if quick and not lengths:
        chosen = (128, 512, 2048, 8192, 16384)
    table = attention_speed(
        lengths=chosen,
        compiled=(8192,) if quick else COMPILED,
        turns=5 if quick else 9,
        budget=0.08 if quick else 0.2,
        notify=OccasionalLines(stderr_console()),
        save=lambda table: _keep(table, out),
    )
    tables = [table]
    series = ["fused / sdpa", "learned / sdpa", "eager / fused", "compiled / fused"]
    if out is not None:
        table.draw(out / "attention.png", "length", series, ["attention", "pass"], "times as long")
    if memory:
        extra = training_memory([n for n in chosen if n >= 512] or chosen)
        _keep(extra, out)
        tables.append(extra)
    _show(tables, 220, as_json)


@bench.command()
def decoding(
    out: Out = None,
    quick: Quick = False,
    batches: Listed = "",
    keys: Annotated[int, typer.Option(min=2, help="Keys in the cache after the step.")] = 8192,
    as_json: AsJson = False,
) -> None:
    """One decoding step of a layer with Llama's shapes against a cache, over Transformers' SDPA attention."""
    from saobp.benchmarking.decoding import BATCHES, decoding_speed

    chosen = _numbers(batches) or BATCHES
    _require_cuda()
    table = decoding_speed(
        batches=chosen,
        keys=keys,
        turns=5 if quick else 9,
        budget=0.08 if quick else 0.2,
        notify=OccasionalLines(stderr_console()),
        save=lambda table: _keep(table, out),
    )
    _show([table], 180, as_json)


@bench.command()
def model(
    out: Out = None,
    quick: Quick = False,
    sizes: Listed = "",
    versions: Listed = "",
    stages: Listed = "",
    limit: Annotated[float, typer.Option(help="Begin no further row after this many seconds.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """BERT training steps and inference on a GPU, refined against original."""
    from saobp.benchmarking.model import REFINEMENTS, STAGES, model_speed
    from saobp.sizes import PAPER_SIZES

    _require_cuda()
    known = {"sizes": tuple(PAPER_SIZES), "versions": tuple(REFINEMENTS), "stages": STAGES}
    selections = {"sizes": sizes, "versions": versions, "stages": stages}
    if quick and not versions:
        selections["versions"] = "original,high,learned"
    chosen = {name: _chosen(name, selections[name], known[name]) for name in known}
    table = model_speed(
        sizes=chosen["sizes"],
        versions=chosen["versions"],
        stages=chosen["stages"],
        turns=7 if quick else 15,
        budget=0.7 if quick else 3.0,
        limit=limit,
        notify=OccasionalLines(stderr_console()),
        save=lambda table: _keep(table, out),
    )
    _show([table], 180, as_json)
    if out is not None:
        table.write(out)
        series = [f"{v} / original" for v in chosen["versions"] if v != "original"]
        table.draw(out / "model.png", "size", series, ["stage", "CUDA graph"], "times as long as original")


@bench.command()
def pretraining(
    out: Out = None,
    models: Annotated[
        str,
        typer.Option(
            help="Such as bert-mini,gpt2-mini; bert-mini@32 is the recipe paper at 32 sequences a step."
        ),
    ] = "bert-mini,bert-small,bert-medium,gpt2-mini",
    versions: Annotated[
        str, typer.Option(help="Some of transformers, transformers-0, plain, high, plain-0.1, high-0.1.")
    ] = "transformers,transformers-0,plain,high",
    turns: Annotated[int, typer.Option(min=1, help="How often every version is timed.")] = 5,
    seconds: Annotated[float, typer.Option(min=0, help="Of one turn of one version.")] = 2.0,
    limit: Annotated[float, typer.Option(help="Begin no further model after this many seconds.")] = 480.0,
    trace: Annotated[bool, typer.Option(help="Count kernels and idle times, too.")] = True,
    as_json: AsJson = False,
) -> None:
    """Tokens per second of pretraining, against plain Transformers; on a CPU bert-tiny only."""
    import torch

    from saobp.benchmarking.pretraining import checked_model, pretraining_speed
    from saobp.benchmarking.timed_training import VERSIONS

    try:
        names = [checked_model(name.strip()) for name in models.split(",")]
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    chosen = _chosen("versions", versions, VERSIONS)
    if any("tiny" not in name for name in names):
        _require_cuda("saobp bench pretraining --models bert-tiny")
    table = pretraining_speed(
        names=names,
        versions=chosen,
        compiled=torch.cuda.is_available(),
        turns=turns,
        seconds=seconds,
        limit=limit,
        traced=trace,
        notify=OccasionalLines(stderr_console()),
        save=lambda table: _keep(table, out),
    )
    _show([table], 200, as_json)


@bench.command()
def cpu(
    out: Out = None,
    quick: Quick = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads that PyTorch may use.")] = 2,
    busy: Annotated[
        bool, typer.Option(help="Count processor time on one thread: for a machine that others use.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """BERT-mini inference on a CPU, refined against original."""
    from saobp.benchmarking.model import cpu_inference

    table = cpu_inference(
        threads=threads,
        busy=busy,
        turns=5 if quick else 15,
        budget=1.0 if quick else 5.0,
        notify=OccasionalLines(stderr_console()),
    )
    _show([table], 120, as_json)
    if out is not None:
        table.write(out)
        picture = out / f"{table.name}.png"
        table.draw(picture, "version", ["over original"], ["batch"], "times as long as original")


def _numbers(text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of whole numbers; empty for an empty text."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) == 0:
            raise typer.BadParameter(f"{part!r} is no whole number: give some joined by commas, as 128,2048")
    return tuple(int(part) for part in parts)


def _chosen(name: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Parse a comma-separated selection of ``known``; all for an empty text."""
    chosen = tuple(part.strip() for part in text.split(",")) if text else known
    for entry in chosen:
        if entry not in known:
            raise typer.BadParameter(f"{entry!r} is none of the {name}: {', '.join(known)}")
    return chosen

"""Size, speed and difference of exported models, int8 included, beside PyTorch on a CPU.

python benchmarks/exported.py [NAME=FOLDER ...] [--text FILE] [--busy]

BERT-mini has random weights: its size and speed are those of a trained one, its differences are not shown.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import BertForMaskedLM

from saobp.benchmarking.model import bert
from saobp.benchmarking.table import BenchmarkTable, Cell, milliseconds, ratio
from saobp.export.folder import pytorch
from saobp.export.formats import Run, exported_program, write_onnx
from saobp.export.token_model import TokenModel, load_token_model, token_model
from saobp.refinement import Refinement
from saobp.runs.machine import machine, version
from saobp.sizes import PAPER_SIZES
from saobp.timing import Result, in_turn, processor_clock, wall_clock

LENGTH, BATCHES = 128, (1, 8)
TURNS, BUDGET = 7, 1.5
Batches = list[tuple[Tensor, ...]]


def exported_speed(models: dict[str, TokenModel], texts: Sequence[str], *, busy: bool) -> BenchmarkTable:
    """Rows of PyTorch, ONNX and int8 for every model; ``busy``: processor time on one thread."""
    threads = 1 if busy else torch.get_num_threads()
    torch.set_num_threads(threads)
    facts = machine("cpu") | {"onnxruntime": version("onnxruntime"), "threads": str(threads)}
    table = BenchmarkTable("exported", f"Exported models on a CPU, {LENGTH} tokens", facts)
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as folder:
            table.rows += _rows(name, model, texts, Path(folder), threads, busy)
    clock = "Processor time on one thread, because others were using the machine" if busy else "Wall time"
    table.notes.append(
        f"{clock}; medians of {TURNS} turns, each version once per turn; a ratio is PyTorch's time over the "
        "version's, the median over turns. PyTorch is the refined model with its CPU path."
    )
    table.notes.append(
        "Difference: root mean square of the difference from PyTorch over that of PyTorch's output, at real "
        "tokens. Same token: share of real tokens with the same most probable token (masked LM). Cosine: "
        f"between mean-pooled states of the two, mean over {len(texts)} texts (encoders without a head). "
        "BERT-mini has random weights, so its differences would mean nothing."
    )
    return table


def _rows(
    name: str, model: TokenModel, texts: Sequence[str], folder: Path, threads: int, busy: bool
) -> list[dict[str, Cell]]:
    program = exported_program(model)
    runs: dict[str, Run] = {"PyTorch": pytorch(model)}
    sizes = {"PyTorch": sum(p.numel() * p.element_size() for p in model.model.parameters()) / 1e6}
    for form, int8 in (("ONNX", False), ("ONNX int8", True)):
        file = folder / f"{form}.onnx"
        runs[form] = write_onnx(program, model, file, int8=int8, threads=threads)
        sizes[form] = file.stat().st_size / 1e6
    timed: dict[int, dict[str, Result]] = {}
    for rows in BATCHES:
        batch = model.batch(rows, LENGTH, padding=False)
        calls = {form: (lambda run=run, batch=batch: run(*batch)) for form, run in runs.items()}
        clock = processor_clock if busy else wall_clock
        timed[rows] = in_turn(calls, turns=TURNS, budget=BUDGET, clock=clock)
    batches = text_batches(model, texts)
    found = []
    for form, run in runs.items():
        row: dict[str, Cell] = {"model": name, "form": form, "MB": sizes[form]}
        for rows in BATCHES:
            row[f"ms, batch {rows}"] = milliseconds(timed[rows][form])
            row[f"times as fast, batch {rows}"] = ratio(timed[rows]["PyTorch"], timed[rows][form])
        is_compared = batches and form != "PyTorch"
        found.append(row | (apart(model, run, runs["PyTorch"], batches) if is_compared else {}))
    return found


def text_batches(model: TokenModel, texts: Sequence[str]) -> Batches:
    """Batches of eight texts; none for a model without a tokenizer."""
    batches: Batches = []
    if model.tokenizer is None:
        return batches
    for first in range(0, len(texts), 8):
        chosen = list(texts[first : first + 8])
        made = model.tokenizer(chosen, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        batches.append(tuple(made[one] for one in model.inputs))
    return batches


def apart(model: TokenModel, run: Run, base: Run, batches: Batches) -> dict[str, Cell]:
    squares = total = 0.0
    same: list[Tensor] = []
    cosines: list[Tensor] = []
    for batch in batches:
        mask = batch[model.inputs.index("attention_mask")]
        real = mask.bool()
        ours, theirs = run(*batch)[0], base(*batch)[0]
        squares += float((ours - theirs)[real].square().sum())
        total += float(theirs[real].square().sum())
        if model.outputs[0] == "logits":
            same.append((ours.argmax(-1) == theirs.argmax(-1))[real])
        else:
            pooled = [(one * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for one in (ours, theirs)]
            cosines.append(cosine_similarity(*pooled))
    found: dict[str, Cell] = {"difference": (squares / total) ** 0.5}
    if same:
        found["same token"] = float(torch.cat(same).float().mean())
    if cosines:
        found["cosine"] = float(torch.cat(cosines).mean())
    return found


def main(
    folders: Annotated[list[str] | None, typer.Argument(help="NAME=FOLDER of models to export.")] = None,
    text: Annotated[Path | None, typer.Option(help="Texts, one per line.")] = None,
    limit: Annotated[int, typer.Option(help="So many texts.")] = 128,
    refinement: Annotated[str, typer.Option(help="For models saved without one.")] = "high:0.2",
    busy: Annotated[bool, typer.Option(help="Processor time on one thread.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the table to this folder.")] = None,
) -> None:
    models = {"BERT-mini": token_model(bert(BertForMaskedLM, PAPER_SIZES["mini"], "high"))}
    for given in folders or ():
        name, _, folder = given.partition("=")
        loaded = load_token_model(folder)
        if loaded.refinement is None:
            loaded = load_token_model(folder, Refinement.parse(refinement))
        models[f"{name}, {loaded.refinement['factor']}:{loaded.refinement['strength']}"] = loaded  # type: ignore[index]
    lines = text.read_text("utf-8").splitlines() if text else []
    texts = [line.strip() for line in lines if len(line.strip()) > 100][:limit]
    table = exported_speed(models, texts, busy=busy)
    table.show(Console(width=200))
    if out is not None:
        table.write(out)


if __name__ == "__main__":
    typer.run(main)

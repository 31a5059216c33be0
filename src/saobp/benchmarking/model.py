"""BERT of the paper's sizes with random weights, refined against original.

On a GPU a training step and inference, on a CPU inference of BERT-mini.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedModel

from saobp.benchmarking.table import BenchmarkTable, Cell, milliseconds, ratio, spread
from saobp.runs.machine import machine
from saobp.sizes import PAPER_SIZES, Size
from saobp.timing import Call, Failure, Result, captured, clock_of, in_turn, processor_clock, wall_clock
from saobp.transformers.apply import apply

VOCABULARY, MASK = 30522, 103

Model = TypeVar("Model", bound=PreTrainedModel)


REFINEMENTS = {
    "original": None,
    "high": "high",
    "learned": "high,strength=learned",
    "key-bias": "high-key-bias,strength=learned",
}
"""Version of a model to the refinement applied to it; ``original`` is Transformers' own SDPA attention."""


def bert(model_class: type[Model], size: Size, version: str, *, vocabulary: int = VOCABULARY) -> Model:
    """A BERT of a kind (a Transformers class) in evaluation mode, refined as its version says."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.ffn,
    )
    model = model_class(config).eval()
    model.set_attn_implementation("sdpa")
    refinement = REFINEMENTS[version]
    return model if refinement is None else apply(model, refinement)


STAGES = ("training step", "inference")


def model_speed(
    *,
    device: str = "cuda",
    sizes: Sequence[str] = tuple(PAPER_SIZES),
    versions: Sequence[str] = tuple(REFINEMENTS),
    stages: Sequence[str] = STAGES,
    training: tuple[int, int] = (256, 128),
    inference: tuple[int, int] = (32, 128),
    vocabulary: int = VOCABULARY,
    compiled: bool = True,
    turns: int = 9,
    budget: float = 2.0,
    limit: float = float("inf"),
    notify: Callable[[str], None] = print,
    save: Callable[[BenchmarkTable], object] = lambda _: None,
) -> BenchmarkTable:
    """One row per stage and size, every version in turn; no row is begun after ``limit`` seconds."""
    how = "torch.compile" if compiled else "eager"
    table = BenchmarkTable(
        "model", f"BERT, refined against original (SDPA), bfloat16, {how}", machine(device)
    )
    table.notes.append(
        f"Milliseconds, medians of {turns} turns in which every version runs once. Training: forward, "
        f"masked-token loss on 15 % of {training[0]} x {training[1]} tokens, backward, fused AdamW, "
        f"bfloat16 autocast. Inference: {inference[0]} x {inference[1]} tokens, bfloat16 weights, also as "
        "the replay of a CUDA graph, without gaps between launches. 'again' is the original timed a second "
        "time, over the first."
    )
    start = time.monotonic()
    for stage in stages:
        for size in sizes:
            if time.monotonic() - start > limit:
                table.notes.append(f"{stage}, {size}: left out, because {limit:g} seconds had passed.")
                continue
            notify(f"{stage}, {size} ...")
            torch._dynamo.reset()
            shape = training if stage == "training step" else inference
            calls, failed = _calls(stage, size, versions, shape, vocabulary, device, compiled, notify)
            results = {**in_turn(calls, turns=turns, budget=budget, clock=clock_of(device)), **failed}
            for replayed in (False, True):
                mine = {n: r for n, r in results.items() if n.endswith(" replayed") == replayed}
                if mine:
                    table.rows.append(_row(stage, size, replayed, versions, mine))
            save(table)
    return table


def _calls(
    stage: str,
    size: str,
    versions: Sequence[str],
    shape: tuple[int, int],
    vocabulary: int,
    device: str,
    compiled: bool,
    notify: Callable[[str], None],
) -> tuple[dict[str, Call], dict[str, Result]]:
    """Callables to time, warmed up and compiled, and failures."""
    ids, labels = masked_batch(shape, vocabulary, device)
    calls: dict[str, Call] = {}
    failed: dict[str, Result] = {}
    for version in versions:
        began = time.monotonic()
        try:
            kind: type[PreTrainedModel] = BertForMaskedLM if stage == "training step" else BertModel
            model = bert(kind, PAPER_SIZES[size], version, vocabulary=vocabulary).to(torch.device(device))  # type: ignore[arg-type]
            if stage == "training step":
                calls[version] = training_step(model, ids, labels, device, compiled)
            else:
                calls[version] = forward_pass(model, ids, device, compiled)
            for _ in range(3):
                calls[version]()
        except Exception as error:
            calls.pop(version, None)
            failed[version] = Failure.of(error)
            continue
        finally:
            notify(f"  {version}: ready after {time.monotonic() - began:.0f} s")
        if stage == "inference" and device == "cuda":
            try:
                calls[f"{version} replayed"] = captured(calls[version])
            except Exception as error:
                failed[f"{version} replayed"] = Failure.of(error)
    for name in ("original", "original replayed"):
        if name in calls:
            calls[name.replace("original", "again")] = calls[name]
    return calls, failed


def _row(
    stage: str, size: str, replayed: bool, versions: Sequence[str], results: dict[str, Result]
) -> dict[str, Cell]:
    results = {name.removesuffix(" replayed"): result for name, result in results.items()}
    base = results.get("original")
    cells: dict[str, Cell] = {"stage": stage, "size": size, "CUDA graph": "yes" if replayed else "no"}
    cells |= {version: milliseconds(results.get(version)) for version in versions}
    cells |= {f"{v} / original": ratio(results.get(v), base) for v in versions if v != "original"}
    return cells | {"spread %": spread(base), "again": ratio(results.get("again"), base)}


def masked_batch(shape: tuple[int, int], vocabulary: int, device: str) -> tuple[Tensor, Tensor]:
    """Random tokens ``[batch, length]`` with 15 % masked, and labels at these positions only."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, shape, generator=random)
    chosen = torch.rand(shape, generator=random) < 0.15
    chosen[:, 0] = True
    ids, labels = tokens.masked_fill(chosen, min(MASK, vocabulary - 1)), tokens.masked_fill(~chosen, -100)
    return ids.to(device), labels.to(device)


def training_step(model: PreTrainedModel, ids: Tensor, labels: Tensor, device: str, compiled: bool) -> Call:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = forward(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def forward_pass(model: PreTrainedModel, ids: Tensor, device: str, compiled: bool) -> Call:
    if device == "cuda":
        model.bfloat16()
    forward = torch.compile(model, dynamic=False) if compiled else model

    def call() -> object:
        with torch.no_grad():
            return forward(input_ids=ids)

    return call


def cpu_inference(
    *,
    batches: Sequence[int] = (1, 32),
    length: int = 128,
    threads: int = 2,
    turns: int = 15,
    budget: float = 5.0,
    busy: bool = False,
    vocabulary: int = VOCABULARY,
    notify: Callable[[str], None] = print,
) -> BenchmarkTable:
    """Milliseconds of a forward pass in single precision, versions in turn, the original twice.

    ``busy`` is for a machine that others use: processor time on one thread, whatever ``threads`` says.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if busy else threads)
    try:
        title = f"BERT-mini inference on a CPU, {length} tokens, float32, no gradient"
        table = BenchmarkTable("cpu-busy" if busy else "cpu", title, machine("cpu"))
        models = {v: bert(BertModel, PAPER_SIZES["mini"], v, vocabulary=vocabulary) for v in REFINEMENTS}
        for batch in batches:
            notify(f"batch {batch} x {length} ...")
            ids = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))
            mask = torch.ones_like(ids)
            calls = {name: _forward(model, ids, mask) for name, model in models.items()}
            calls["again"] = calls["original"]
            clock = processor_clock if busy else wall_clock
            results = in_turn(calls, turns=turns, budget=budget, clock=clock)
            base = results["original"]
            for name, result in results.items():
                table.rows.append(
                    {
                        "batch": batch,
                        "version": name,
                        "ms": milliseconds(result),
                        "spread %": spread(result),
                        "over original": ratio(result, base),
                    }
                )
    finally:
        torch.set_num_threads(before)
    if busy:
        table.notes.append("Processor time on one thread, because others were using the machine.")
    table.notes.append(
        f"Medians of {turns} turns, each version once per turn; a ratio is the median over turns of "
        "neighbours in time, the spread half the distance between quartiles. 'again' is the original timed a "
        "second time, so the noise of a ratio."
    )
    return table


def _forward(model: BertModel, ids: torch.Tensor, mask: torch.Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.inference_mode():
            return model(input_ids=ids, attention_mask=mask)

    return call

"""BERT-mini inference on a CPU: refined against original."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import BertModel

from saobp.benchmarking.bert_models import VOCABULARY, bert
from saobp.benchmarking.table import BenchmarkTable, milliseconds, ratio, spread
from saobp.runs.machine import machine
from saobp.sizes import PAPER_SIZES
from saobp.timing import in_turn, processor_clock, wall_clock

VERSIONS = ("original", "high", "learned")


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
        models = {v: bert(BertModel, PAPER_SIZES["mini"], v, vocabulary=vocabulary) for v in VERSIONS}
        for batch in batches:
            notify(f"batch {batch} x {length} ...")
            ids = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))
            mask = torch.ones_like(ids)
            calls = {name: _forward(model, ids, mask) for name, model in models.items()}
            calls["original again"] = calls["original"]
            clock = processor_clock if busy else wall_clock
            found = in_turn(calls, turns=turns, budget=budget, clock=clock)
            base = found["original"]
            for name, result in found.items():
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
        "neighbours in time, the spread half the distance between quartiles. 'original again' is the noise "
        "of a ratio."
    )
    return table


def _forward(model: BertModel, ids: torch.Tensor, mask: torch.Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.inference_mode():
            return model(input_ids=ids, attention_mask=mask)

    return call

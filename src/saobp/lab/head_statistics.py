"""Statistics of every head on many texts: means by layer and head, and a sample of (text, head) pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.metrics.attention_calls import inputs_of
from saobp.metrics.diagnosis.diagnose import check_weights
from saobp.metrics.functional.gtd import BETA, HOPS
from saobp.metrics.health.head_health import CROSS_LAYER
from saobp.metrics.health.recorder import Recorder
from saobp.metrics.query_key_statistics import STATISTICS, measure_heads
from saobp.transformers.capture import AttentionCall, watch

TEXTS_AT_ONCE = 32
POINTS = 1500
"""(text, head) pairs saved for scatter plots, evenly sampled."""
POINT_STATISTICS = ("gtd", "clustering", "betweenness")


def measure_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, length: int
) -> dict[str, Any]:
    """Statistics of every head on texts cut to ``length`` tokens, JSON-serialisable.

    ``layers`` has for each statistic and layer the mean of each head, ``points`` (text, head) pairs.
    """
    check_weights(model, "the model")
    device = next(model.parameters()).device
    found: dict[str, list[dict[str, Tensor]]] = {}
    recorder = Recorder(model, ("gtd", CROSS_LAYER))
    tokens = 0

    def keep(call: AttentionCall) -> None:
        heads = inputs_of(call)
        assert heads is not None
        measured = measure_heads(heads, "exact", STATISTICS, beta=BETA, hops=HOPS)
        own = {name: estimate.value.double().cpu() for name, estimate in measured.items()}
        found.setdefault(call.name, []).append(own)

    model.eval()
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        batch = _encoded(tokenizer, texts[start : start + TEXTS_AT_ONCE], length)
        tokens += int(batch["attention_mask"].sum())
        with torch.no_grad(), watch(model, keep):
            model(**{name: part.to(device) for name, part in batch.items()})
        with torch.no_grad(), recorder.measuring():
            model(**{name: part.to(device) for name, part in batch.items()})
    joined = [
        {name: torch.cat([part[name] for part in parts]) for name in STATISTICS} for parts in found.values()
    ]
    return {
        "texts": len(texts),
        "tokens": tokens,
        "length": length,
        "names": list(found),
        "layers": {name: [layer[name].mean(0).tolist() for layer in joined] for name in STATISTICS},
        CROSS_LAYER: list(recorder.health.cross_layer_gtd().values()),
        "points": _points(joined),
    }


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> dict[str, Tensor]:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(list(texts), truncation=True, max_length=length, padding=True, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _points(layers: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Pairs spread evenly over layers, heads and texts, with their layer."""
    grids = {name: torch.stack([layer[name] for layer in layers]) for name in POINT_STATISTICS}
    shape = grids["gtd"].shape
    total = grids["gtd"].numel()
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:POINTS].sort().values
    per_layer = shape[1] * shape[2]
    return [
        {
            "layer": int(place) // per_layer,
            **{name: round(float(grid.flatten()[place]), 5) for name, grid in grids.items()},
        }
        for place in chosen
    ]

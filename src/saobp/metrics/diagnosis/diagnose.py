"""The health of a model on some texts, as one record.

Models outside Transformers' attention registry are measured by the maps that they return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.metrics.attention_inputs import inputs_of
from saobp.metrics.diagnosis.expected_time import ExpectedTime
from saobp.metrics.diagnosis.head_kinds import (
    IN_TEXT,
    KINDS,
    ON_REPETITION,
    Kind,
    delimiter_ids,
    kind_of,
    repeated_tokens,
    repetition_targets,
    shares,
    text_targets,
)
from saobp.metrics.diagnosis.text_batches import Note, batches, encode, padding_id
from saobp.metrics.functional.gtd import BETA, HOPS, cross_layer_gtd
from saobp.metrics.functional.maps import unchecked_maps
from saobp.metrics.health.head_health import CROSS_LAYER, HeadHealth, Health
from saobp.metrics.health.recorder import probe
from saobp.metrics.health.verdicts import Verdict, uniform_map
from saobp.metrics.query_key_statistics import checked_statistics, map_statistics
from saobp.metrics.sampling import exact_estimate
from saobp.transformers.apply import attention_modules
from saobp.transformers.capture import AttentionCall, watch
from saobp.transformers.input_length import max_input_length

KIND_TEXTS, KIND_TOKENS = 8, 128
"""Texts and tokens of each on which the kinds of heads are found."""


@dataclass(frozen=True)
class Diagnosis:
    """Every head of a model, with the cross-layer GTD of each layer from the second on.

    ``subject`` names the model and its refinement; ``settings`` is how it was measured.
    """

    subject: str
    heads: tuple[HeadHealth, ...]
    across_layers: dict[int, float]
    statistics: tuple[str, ...]
    texts: int
    tokens: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        return 1 + max(head.layer for head in self.heads)

    def layer(self, index: int) -> list[HeadHealth]:
        return [head for head in self.heads if head.layer == index]

    def count(self, verdict: Verdict) -> int:
        return sum(head.verdict == verdict for head in self.heads)

    def of_kind(self, kind: Kind) -> list[HeadHealth]:
        """Heads of a kind, the clearest first."""
        heads = [head for head in self.heads if head.kind == kind]
        return sorted(heads, key=lambda head: -head.shares[kind])

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "subject": self.subject,
            "texts": self.texts,
            "tokens": self.tokens,
            "settings": self.settings,
            "cross_layer_gtd": {str(layer): value for layer, value in self.across_layers.items()},
            "kinds": dict(Counter(head.kind for head in self.heads if head.kind)),
            "heads": [head.to_dict() for head in self.heads],
        }


def diagnose(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    subject: str = "model",
    statistics: Collection[str],
    method: str = "auto",
    length: int | None = None,
    batch_size: int = 8,
    progress: Callable[[float], object] = lambda _: None,
    note: Note = lambda _: None,
) -> Diagnosis:
    """Run ``model`` on ``texts``, measure every head and find its kind.

    ``length`` cuts texts to so many tokens; without it they are cut to what the model takes. ``progress``
    gets the number of further texts done, in parts, ``note`` sentences on what is cut or left out, and on
    the time it will take. A model whose attention cannot be watched is measured by the maps that it returns.
    """
    check_weights(model, subject)
    encoded = encode(model, tokenizer, texts, length, subject, note)
    model.eval()
    device = next(model.parameters()).device
    encoded = [one.to(device) for one in encoded]
    found = head_shares(model, tokenizer, encoded)
    timed = ExpectedTime(encoded, len(found), progress, note)
    if unreachable(model) is None:
        health = _watched(model, tokenizer, encoded, statistics, method, batch_size, timed)
    elif method == "sampled":
        raise ValueError(f"{unreachable(model)} without whole maps: use method 'exact' or 'auto'")
    else:
        health = measure_returned_maps(model, encoded, statistics, timed)
    if not health:
        raise ValueError(
            f"{subject} ran without any self-attention over a whole text, so there is nothing to measure"
        )
    places = {name: place for place, name in enumerate(health.layers)}
    return Diagnosis(
        subject,
        tuple(_with_kind(head, found) for head in health.heads()),
        {places[name]: value for name, value in health.cross_layer_gtd().items()},
        health.statistics,
        len(encoded),
        sum(map(len, encoded)),
        {"method": method, "length": length, "batch_size": batch_size},
    )


def check_weights(model: nn.Module, subject: str) -> None:
    """Raises if weights are not finite."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"the weights of {subject} hold NaN or infinite values, first in {name}")


def head_shares(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoded: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Share of attention on each of KINDS, ``[heads, kinds]`` by layer: see :mod:`head_kinds`."""
    chosen = encoded[:: max(1, len(encoded) // KIND_TEXTS)][:KIND_TEXTS]
    texts = [ids[:KIND_TOKENS] for ids in chosen]
    delimiters = delimiter_ids(tokenizer, torch.cat(texts).tolist())
    in_text: dict[int, list[Tensor]] = {}
    repeating: dict[int, Tensor] = {}
    for ids in texts:

        def on_text(layer: int, rows: Tensor, ids: Tensor = ids) -> None:
            causal = _is_causal(rows)
            targets = text_targets(ids.cpu(), delimiters, causal=causal)
            in_text.setdefault(layer, []).append(shares(rows, targets, causal=causal)[0])

        for_each_layer(model, ids[None], on_text)
    sequences, repeated = repeated_tokens(model, tokenizer, max_input_length(model))
    if repeated > 1:
        targets = repetition_targets(sequences.shape[1], repeated)

        def on_repeated(layer: int, rows: Tensor) -> None:
            repeating[layer] = shares(rows, targets, causal=_is_causal(rows)).mean(0)

        for_each_layer(model, sequences.to(texts[0].device), on_repeated)
    by_layer = {}
    for layer, values in in_text.items():
        ordinary = torch.stack(values).mean(0).cpu()
        repetition = ordinary.new_zeros(len(ordinary), len(ON_REPETITION))
        if layer in repeating:
            repetition = repeating[layer].cpu()
        by_layer[layer] = torch.cat([ordinary, repetition], -1)
    assert len(IN_TEXT) + len(ON_REPETITION) == len(KINDS)
    return by_layer


def _is_causal(rows: Tensor) -> bool:
    return not bool(rows.triu(1).any())


def _with_kind(head: HeadHealth, shares_by_layer: dict[int, Tensor]) -> HeadHealth:
    if head.layer not in shares_by_layer or head.head >= len(shares_by_layer[head.layer]):
        return head
    shares = dict(zip(KINDS, shares_by_layer[head.layer][head.head].tolist(), strict=True))
    return replace(head, kind=kind_of(shares), shares=shares)


def _watched(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[Tensor],
    statistics: Collection[str],
    method: str,
    batch_size: int,
    timed: ExpectedTime,
) -> Health:
    device = encoded[0].device
    measured = probe(model, statistics=statistics, method=method)  # type: ignore[arg-type]
    with torch.no_grad(), measured as health, timed.watching(model):
        for batch in batches(encoded, batch_size, padding_id(tokenizer)):
            timed.begin(len(batch["input_ids"]))
            model(**{name: part.to(device) for name, part in batch.items()})
            timed.end()
    return health


OnLayer = Callable[[int, Tensor], object]
"""Called with the number of a layer and its maps ``[texts, heads, length, length]``."""


def unreachable(model: PreTrainedModel) -> str | None:
    """Why calls of attention cannot be watched in this model; None if they can."""
    try:
        attention_modules(model)
    except ValueError as problem:
        return str(problem)
    return None


def for_each_layer(model: PreTrainedModel, ids: Tensor, on_layer: OnLayer) -> None:
    """Run ``model`` on ids ``[texts, length]`` without padding and show the maps of each layer."""
    if unreachable(model) is not None:
        for layer, rows in enumerate(returned_maps(model, ids)):
            on_layer(layer, rows)
        return
    layer = 0

    def record(call: AttentionCall) -> None:
        nonlocal layer
        heads = inputs_of(call, linear=True)
        if heads is not None:
            every = slice(0, len(heads.query)), slice(0, heads.query.shape[1])
            on_layer(layer, heads.select(*every).maps().rows)
            layer += 1

    with torch.no_grad(), watch(model, record):
        model(input_ids=ids)


def returned_maps(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """What the model returns for ``output_attentions``. Raises if these are no maps of its tokens."""
    with torch.no_grad():
        attentions = getattr(model(input_ids=ids, output_attentions=True), "attentions", None) or ()
    length = ids.shape[1]
    maps = [
        layer_maps
        for layer_maps in attentions
        if isinstance(layer_maps, Tensor) and layer_maps.shape[2:] == (length, length)
    ]
    if not maps or len(maps) < len(attentions) or not all(_is_stochastic(layer_maps) for layer_maps in maps):
        raise ValueError(f"{unreachable(model)}, and it returns no attention maps")
    return maps


def measure_returned_maps(
    model: PreTrainedModel,
    texts: Iterable[Tensor],
    statistics: Collection[str],
    timed: ExpectedTime,
) -> Health:
    """Exact statistics of the maps that a model returns, text by text."""
    names = checked_statistics("exact", [name for name in statistics if name != CROSS_LAYER])
    health = Health(names)
    for ids in texts:
        timed.begin(1)
        layers = returned_maps(model, ids[None])
        across = cross_layer_gtd(layers) if CROSS_LAYER in statistics and len(layers) > 1 else None
        for layer, rows in enumerate(layers):
            causal = _is_causal(rows)
            values = map_statistics(unchecked_maps(rows), names, BETA, HOPS, triangular=causal)
            tokens = torch.tensor([ids.numel()], device=rows.device)
            health.add(
                f"layer {layer}",
                {name: exact_estimate(value) for name, value in values.items()},
                uniform_map(tokens, causal=causal),
                None if across is None or layer == 0 else across[layer - 1],
            )
        health.forwards += 1
        timed.end()
    return health


def _is_stochastic(rows: Tensor) -> bool:
    sums = rows.sum(-1)
    return bool(torch.isfinite(sums).all()) and bool(((sums - 1).abs() < 0.02).all())

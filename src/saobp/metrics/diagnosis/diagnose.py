"""The health of a model on some texts, as one record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.metrics.attention_inputs import AttentionInputs
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
from saobp.metrics.health.head_health import RETURNED_MAPS, HeadHealth, Health
from saobp.metrics.health.recorder import probe
from saobp.metrics.health.verdicts import Verdict
from saobp.metrics.observed_attention import ObservedAttention
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
    the time it will take.
    """
    check_weights(model, subject)
    encoded = encode(model, tokenizer, texts, length, subject, note)
    model.eval()
    device = next(model.parameters()).device
    encoded = [one.to(device) for one in encoded]
    found = head_shares(model, tokenizer, encoded)
    timed = ExpectedTime(encoded, len(found), progress, note)
    health = _watched(model, tokenizer, encoded, statistics, method, batch_size, timed)
    if health.measured_from == RETURNED_MAPS:
        note(f"{subject} is measured from {RETURNED_MAPS}, so memory grows with the square of the length")
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
        {
            "method": method,
            "length": length,
            "batch_size": batch_size,
            "measured_from": health.measured_from,
        },
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


def for_each_layer(model: PreTrainedModel, ids: Tensor, on_layer: OnLayer) -> None:
    """Run ``model`` on ids ``[texts, length]`` without padding and show the maps of each layer."""
    numbers = count()

    def show(name: str, stack: str, heads: AttentionInputs) -> None:
        del name, stack
        every = slice(0, len(heads.query)), slice(0, heads.query.shape[1])
        on_layer(next(numbers), heads.select(*every).maps().rows)

    observed = ObservedAttention(model, show)
    with torch.no_grad(), observed.observing():
        model(input_ids=ids)

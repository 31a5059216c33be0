"""The health of a model on some texts, as one record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.metrics.health.head_health import HeadHealth
from saobp.metrics.health.recorder import probe
from saobp.metrics.health.verdicts import Verdict

CHARACTERS_PER_TOKEN = 32
"""Upper bound on characters per token, so that long texts are cut before they are tokenised."""


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

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "subject": self.subject,
            "texts": self.texts,
            "tokens": self.tokens,
            "settings": self.settings,
            "cross_layer_gtd": {str(layer): value for layer, value in self.across_layers.items()},
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
    progress: Callable[[int], object] = lambda _: None,
) -> Diagnosis:
    """Run ``model`` on ``texts`` and measure every head; ``progress`` gets the number of texts done.

    ``length`` cuts texts to so many tokens; without it a text longer than the model can take is an error.
    """
    check_weights(model, subject)
    encoded = _encoded(model, tokenizer, texts, length)
    device = next(model.parameters()).device
    tokens = 0
    model.eval()
    with torch.no_grad(), probe(model, statistics=statistics, method=method) as health:  # type: ignore[arg-type]
        for batch in _batches(encoded, batch_size, _padding_id(tokenizer)):
            model(**{name: part.to(device) for name, part in batch.items()})
            tokens += int(batch["attention_mask"].sum())
            progress(len(batch["input_ids"]))
    if not health:
        raise ValueError(
            f"{subject} ran without any self-attention over a whole text, so there is nothing to measure"
        )
    places = {name: place for place, name in enumerate(health.layers)}
    return Diagnosis(
        subject,
        tuple(health.heads()),
        {places[name]: value for name, value in health.cross_layer_gtd().items()},
        health.statistics,
        len(encoded),
        tokens,
        {"method": method, "length": length, "batch_size": batch_size},
    )


def check_weights(model: nn.Module, subject: str) -> None:
    """Raises if weights are not finite."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"the weights of {subject} hold NaN or infinite values, first in {name}")


def longest_text(model: PreTrainedModel) -> int | None:
    """Maximum length from the model's config; None if it does not say."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def _encoded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int | None
) -> list[Tensor]:
    limit = longest_text(model)
    if length is not None and (length < 2 or (limit is not None and length > limit)):
        reach = "" if limit is None else f" and at most {limit}, the reach of the model"
        raise ValueError(f"texts can be cut to at least 2 tokens{reach}, not to {length}")
    if length is not None:
        texts = [text[: CHARACTERS_PER_TOKEN * length] for text in texts]
    ids = [
        torch.tensor(tokenizer(text, truncation=length is not None, max_length=length)["input_ids"])
        for text in texts
    ]
    kept = [one for one in ids if len(one) > 1]
    if not kept:
        raise ValueError("the texts hold no more than a token each, so there is no attention to look at")
    longest = max(range(len(kept)), key=lambda place: len(kept[place]))
    if limit is not None and len(kept[longest]) > limit:
        raise ValueError(
            f"a text has {len(kept[longest])} tokens but the model takes {limit}: pass length={limit} "
            "(--length on the command line) to cut long texts"
        )
    return kept


def _batches(encoded: list[Tensor], size: int, padding: int) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(encoded), size):
        part = encoded[start : start + size]
        ids = nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=padding)
        lengths = torch.tensor([len(one) for one in part])
        yield {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def _padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0

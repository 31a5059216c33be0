"""The same model on the same text, before and after a refinement."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import saobp
from saobp.metrics import HeadHealth
from saobp.quickstart.training import LENGTH, held_out_loss
from saobp.transformers import record_attention

STATISTICS = ("attention_entropy", "sink_mass", "gtd")
FEWEST_TOKENS, MOST_TOKENS = 12, 20


@dataclass(frozen=True)
class Look:
    """What one state of the model does: rows on a sentence, and means over held-out text.

    rows: ``[layers, heads, length, length]``
    loss: of masked tokens in held-out text, in nats
    """

    rows: Tensor
    heads: tuple[HeadHealth, ...]
    loss: float

    def mean(self, statistic: str) -> float:
        return sum(head.values[statistic] for head in self.heads) / len(self.heads)


@dataclass(frozen=True)
class Comparison:
    """A sentence in tokens, and two looks at the model."""

    sentence: str
    tokens: list[str]
    refinement: str
    before: Look
    after: Look

    def moved(self) -> Tensor:
        """Share of each row's attention that went to other tokens, ``[layers, heads, length]``."""
        return (self.after.rows - self.before.rows).abs().sum(-1) / 2

    def most_moved_heads(self, count: int) -> list[tuple[int, int]]:
        """Layer and head, the one that moved most first."""
        moved = self.moved().mean(-1)
        order = moved.flatten().argsort(descending=True)[:count].tolist()
        return [divmod(place, moved.shape[1]) for place in order]

    def most_moved_row(self) -> tuple[int, int, int]:
        """Layer, head and row of the sentence's own tokens that moved most."""
        moved = self.moved()[..., 1:-1]
        place = int(moved.argmax())
        layer, rest = divmod(place, moved[0].numel())
        head, row = divmod(rest, moved.shape[-1])
        return layer, head, row + 1


def choose_sentence(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> str:
    """A sentence short enough to draw, of words that the vocabulary knows best."""
    sentences = [one for text in texts for one in re.findall(r"[A-Z][a-z][^.?!]+\.(?=\s|$)", text)]
    sizes = [len(one) for one in tokenizer.backend_tokenizer.encode_batch(sentences)]
    fitting = [
        (size / len(one.split()), one)
        for one, size in zip(sentences, sizes, strict=True)
        if FEWEST_TOKENS <= size <= MOST_TOKENS
    ]
    return min(fitting)[1] if fitting else texts[0][:LENGTH]


def encode(tokenizer: PreTrainedTokenizerFast, sentence: str) -> Tensor:
    """Tokens of a sentence that the model can take, ``[1, length]``."""
    ids = torch.tensor([tokenizer.backend_tokenizer.encode(sentence).ids])
    if ids.shape[1] > LENGTH:
        raise ValueError(f"the sentence has {ids.shape[1]} tokens but this model takes {LENGTH}: shorten it")
    if ids.shape[1] < 3:
        raise ValueError("the sentence holds no word: give one to draw")
    return ids


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    sentence: str,
    ids: Tensor,
    lines: Tensor,
    refinement: str,
    progress: Callable[[float], object] = lambda _: None,
) -> Comparison:
    """Look at the model plain and refined, on a sentence and its ``ids``, and on held-out ``lines``.

    The model is left plain.
    """
    before = _look(model, ids, lines)
    progress(0.5)
    saobp.apply(model, refinement)
    after = _look(model, ids, lines)
    saobp.remove(model)
    progress(1.0)
    tokens = [str(tokenizer.convert_ids_to_tokens(one)) for one in ids[0].tolist()]
    return Comparison(sentence, tokens, refinement, before, after)


@torch.no_grad()
def _look(model: PreTrainedModel, ids: Tensor, lines: Tensor) -> Look:
    with record_attention(model) as recorded:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    rows = torch.stack([calls[0][0] for calls in recorded.values()])
    with saobp.probe(model, statistics=STATISTICS) as health:
        loss = held_out_loss(model, lines)
    return Look(rows, tuple(health.heads()), loss)

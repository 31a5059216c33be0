"""Products with an attention matrix that is never formed: A V, A^T X, and single rows.

An operator stands for the maps of some heads of one text without padding. All of its memory is linear in the
text's length.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

TILE_BYTES = 32 * 2**20
"""Size of the largest piece of a map that is in memory at a time."""


class AttentionOperator(Protocol):
    """Maps ``[heads, tokens, tokens]`` seen only through products."""

    causal: bool

    def rows(self, places: Tensor) -> Tensor:
        """Exact rows at ``places [rows]``: ``[heads, rows, tokens]`` in at least single precision."""

    def sweep(self, forward: Tensor | None, backward: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """``A @ forward`` and ``A^T @ backward``, both ``[heads, tokens, channels]``; None is left out."""


class PlainOperator:
    """Softmax attention by fused kernels in both directions.

    A^T X is attention with queries and keys exchanged and each row of X divided by its own normaliser. The
    kernel's normalisation is undone by an anchor: one more key whose score is known, with a value channel of
    its own, so that every row reports the anchor's share. The rows' normalisers, as log-sum-exp, come from an
    anchor in the first forward product. Heads with scores too far apart for that take a longer way, where the
    anchor's score or the normaliser is a further coordinate of the states.
    """

    def __init__(self, query: Tensor, key: Tensor, *, causal: bool, scale: float) -> None:
        """query and key ``[heads, tokens, dim]`` of one type."""
        self.query, self.key, self.causal, self.scale = query, key, causal, scale
        self.precision = torch.promote_types(query.dtype, torch.float32)
        self._partition: Tensor | None = None
        self._tame = False

    def rows(self, places: Tensor) -> Tensor:
        return score_rows(self.query[:, places], self.key, places, self.causal, self.scale).softmax(-1)

    def sweep(self, forward: Tensor | None, backward: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        output = None
        if backward is not None and self._partition is None:
            output = self._first_forward(forward)
        elif forward is not None:
            output = _fused(self.query, self.key, forward, self.causal, self.scale)
        return output, None if backward is None else self._backward(backward)

    def _first_forward(self, values: Tensor | None) -> Tensor | None:
        """``A @ values``, and each row's log-sum-exp ``[heads, tokens]`` on the way."""
        query = self.query
        if values is None:
            values = query.new_zeros(*query.shape[:2], 0)
        output, share = self._anchored(query, self.key.new_zeros(len(query), 1, query.shape[2]), values)
        partition = torch.log1p(-share) - share.log()
        low, high = partition.amin(), partition.amax()
        self._tame = bool((share.amax() < 0.9) & (low > -50) & (high < 60) & (high - low < 50))
        if not self._tame:
            bound = self._lower_bounds().to(query.dtype)
            asking = torch.cat([query, bound[..., None]], -1)
            anchor = functional.pad(query.new_zeros(len(query), 1, query.shape[2]), (0, 1), value=1.0)
            output, share = self._anchored(asking, anchor, values)
            partition = bound.to(share.dtype) * self.scale + torch.log1p(-share) - share.log()
            self._repair(partition, share)
        self._partition = partition
        return output / (1 - share[..., None]).to(output.dtype) if values.shape[-1] else None

    def _anchored(self, query: Tensor, anchor: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Attention with the anchor ``[heads, 1, dim]`` as the first key, and the share that it takes."""
        key = functional.pad(self.key, (0, query.shape[-1] - self.key.shape[-1]))
        output = _fused(
            functional.pad(query, (0, 0, 1, 0)),
            torch.cat([anchor, key], 1),
            _with_anchor_channel(values),
            self.causal,
            self.scale,
        )[:, 1:]
        return output[..., :-1], output[..., -1].to(self.precision)

    def _lower_bounds(self) -> Tensor:
        """Per row a bound on the log-sum-exp from the mean score (Jensen's inequality), over the scale."""
        keys = self.key.to(self.precision)
        tokens = keys.shape[1]
        if self.causal:
            seen = torch.arange(1, tokens + 1, device=keys.device, dtype=keys.dtype)
            return (self.query * (keys.cumsum(1) / seen[:, None])).sum(-1) + seen.log() / self.scale
        return (self.query * keys.mean(1, keepdim=True)).sum(-1) + math.log(tokens) / self.scale

    def _repair(self, partition: Tensor, share: Tensor) -> None:
        """Compute rows directly where the anchor's share has underflown."""
        lost = (share <= torch.finfo(self.query.dtype).tiny * 16).any(0).nonzero()[:, 0]
        step = max(1, TILE_BYTES // (4 * self.key.shape[0] * self.key.shape[1]))
        for places in lost.split(step):
            scores = score_rows(self.query[:, places], self.key, places, self.causal, self.scale)
            partition[:, places] = scores.logsumexp(-1)

    def _backward(self, states: Tensor) -> Tensor:
        assert self._partition is not None
        asking, speaking = self.key, self.query
        if self._tame:
            lowest = self._partition.amin(-1, keepdim=True)
            states = (states * (lowest - self._partition).exp()[..., None]).to(speaking.dtype)
        else:
            parts = _split(-self._partition / self.scale, speaking.dtype)
            asking = functional.pad(asking, (0, len(parts)), value=1.0)
            speaking = torch.cat([speaking, torch.stack(parts, -1)], -1)
        if self.causal:
            asking, speaking, states = asking.flip(1), speaking.flip(1), states.flip(1)
        output = _fused(
            functional.pad(asking, (0, 0, 1, 0)),
            functional.pad(speaking, (0, 0, 1, 0)),
            _with_anchor_channel(states),
            self.causal,
            self.scale,
        )[:, 1:].to(self.precision)
        result = output[..., :-1] / output[..., -1:]
        if self._tame:
            result = result * (-lowest).exp()[..., None]
        result = result.to(states.dtype)
        return result.flip(1) if self.causal else result


class SimilarityOperator:
    """ElemMul without causality, row-normalised A A^T, as products with A."""

    def __init__(self, plain: PlainOperator) -> None:
        self.plain, self.causal = plain, False
        ones = plain.query.new_ones(*plain.query.shape[:2], 1)
        self.total = self._alike(ones)

    def rows(self, places: Tensor) -> Tensor:
        rows = self.plain.rows(places)
        alike, _ = self.plain.sweep(rows.transpose(-1, -2).to(self.plain.query.dtype), None)
        assert alike is not None
        alike = alike.to(rows.dtype).transpose(-1, -2)
        return alike / alike.sum(-1, keepdim=True)

    def sweep(self, forward: Tensor | None, backward: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        output = None if forward is None else self._alike(forward) / self.total
        return output, None if backward is None else self._alike(backward / self.total)

    def _alike(self, states: Tensor) -> Tensor:
        _, gathered = self.plain.sweep(None, states)
        assert gathered is not None
        spread, _ = self.plain.sweep(gathered, None)
        assert spread is not None
        return spread


def score_rows(query: Tensor, key: Tensor, places: Tensor, causal: bool, scale: float) -> Tensor:
    """Scores of the queries at ``places``, hidden keys at minus infinity: ``[heads, places, tokens]``."""
    precision = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(precision) @ key.to(precision).transpose(-1, -2) * scale
    if causal:
        hidden = torch.arange(key.shape[1], device=key.device) > places[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _with_anchor_channel(values: Tensor) -> Tensor:
    """Values with a first row for the anchor, which alone has 1 in a new last channel."""
    values = functional.pad(values, (0, 1, 1, 0))
    values[:, 0, -1] = 1.0
    return values


def _fused(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """Torch's own attention on ``[heads, tokens, dim]``; states and values get one width for fast kernels."""
    channels = value.shape[-1]
    width = -(-max(query.shape[-1], channels) // 8) * 8
    query, key, value = (
        functional.pad(part, (0, width - part.shape[-1]))[None] for part in (query, key, value)
    )
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
    return output[0, ..., :channels]


def _split(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of a short type that add up to ``values`` closely enough for an exponent."""
    first = values.to(dtype)
    if torch.finfo(dtype).bits >= 32:
        return [first]
    return [first, (values - first.to(values.dtype)).to(dtype)]

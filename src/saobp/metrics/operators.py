"""Products with an attention matrix that is never formed: A V, A^T X, and single rows.

An operator stands for the maps of some heads of one text without padding. All of its memory is linear in the
text's length.
"""

from __future__ import annotations

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

    A^T X is attention with queries and keys exchanged, once each row's log-sum-exp is subtracted from its
    scores as a further coordinate of the states. The kernel's own normalisation is undone by an anchor: one
    more key of known weight with a value channel of its own, whose share every row reports. The log-sum-exp
    comes from such an anchor too, in the first forward product that needs it.
    """

    def __init__(self, query: Tensor, key: Tensor, *, causal: bool, scale: float) -> None:
        """query and key ``[heads, tokens, dim]`` of one type."""
        self.query, self.key, self.causal, self.scale = query, key, causal, scale
        self._partition: Tensor | None = None

    def rows(self, places: Tensor) -> Tensor:
        return score_rows(self.query[:, places], self.key, places, self.causal, self.scale).softmax(-1)

    def sweep(self, forward: Tensor | None, backward: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        output = None
        if backward is not None and self._partition is None:
            output, self._partition = self._anchored_forward(forward)
        elif forward is not None:
            output = _fused(self.query, self.key, forward, self.causal, self.scale)
        return output, None if backward is None else self._backward(backward)

    def _anchored_forward(self, values: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """``A @ values`` and each row's log-sum-exp ``[heads, tokens]``.

        The anchor's score is at most the log-sum-exp (Jensen's inequality), so its share loses no digits;
        where it underflows, the rows are computed directly.
        """
        query, key = self.query, self.key
        lengths = torch.arange(1, key.shape[1] + 1, device=key.device) if self.causal else key.shape[1]
        keys = key.to(torch.promote_types(key.dtype, torch.float32))
        if self.causal:
            mean_key = keys.cumsum(1) / torch.as_tensor(lengths)[:, None]
        else:
            mean_key = keys.mean(1, keepdim=True)
        bound = (query * mean_key).sum(-1) + torch.as_tensor(lengths).log() / self.scale
        bound = bound.to(query.dtype)
        anchor = functional.pad(key.new_zeros(len(key), 1, key.shape[2]), (0, 1), value=1.0)
        width = 0 if values is None else values.shape[-1]
        stacked = functional.pad(
            key.new_zeros(len(key), key.shape[1], 0) if values is None else values, (0, 1, 1, 0)
        )
        stacked[:, 0, width] = 1.0
        output = _fused(
            functional.pad(torch.cat([query, bound[..., None]], -1), (0, 0, 1, 0)),
            torch.cat([anchor, functional.pad(key, (0, 1))], 1),
            stacked,
            self.causal,
            self.scale,
        )[:, 1:]
        share = output[..., width].to(mean_key.dtype)
        partition = bound.to(share.dtype) * self.scale + torch.log1p(-share) - share.log()
        self._repair(partition, share)
        if values is None:
            return None, partition
        return output[..., :width] / (1 - share[..., None]).to(output.dtype), partition

    def _repair(self, partition: Tensor, share: Tensor) -> None:
        lost = (share <= torch.finfo(self.query.dtype).tiny * 16).any(0).nonzero()[:, 0]
        step = max(1, TILE_BYTES // (4 * self.key.shape[0] * self.key.shape[1]))
        for places in lost.split(step):
            scores = score_rows(self.query[:, places], self.key, places, self.causal, self.scale)
            partition[:, places] = scores.logsumexp(-1)

    def _backward(self, states: Tensor) -> Tensor:
        assert self._partition is not None
        query, key = self.query, self.key
        parts = _split(-self._partition / self.scale, query.dtype)
        askers = functional.pad(key, (0, len(parts)), value=1.0)
        speakers = torch.cat([query, torch.stack(parts, -1)], -1)
        if self.causal:
            askers, speakers, states = askers.flip(1), speakers.flip(1), states.flip(1)
        channels = states.shape[-1]
        stacked = functional.pad(states, (0, 1, 1, 0))
        stacked[:, 0, channels] = 1.0
        output = _fused(
            functional.pad(askers, (0, 0, 1, 0)),
            functional.pad(speakers, (0, 0, 1, 0)),
            stacked,
            self.causal,
            self.scale,
        )[:, 1:]
        result = output[..., :channels] / output[..., channels:]
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

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
"""Maximum bytes of a tile of a map."""
EARLY = 64
"""Rows at the start of a causal map that are computed directly."""
ROW_STEPS = {"cuda": 128}
"""By device type: lengths are padded to a multiple of this, where kernels are faster."""


class AttentionOperator(Protocol):
    """A linear operator: maps ``[heads, tokens, tokens]`` accessed by their products only."""

    causal: bool

    def rows(self, positions: Tensor) -> Tensor:
        """Exact rows at ``positions [rows]``: ``[heads, rows, tokens]`` in at least single precision."""

    def sweep(self, forward: Tensor | None, backward: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """``A @ forward`` and ``A^T @ backward``, both ``[heads, tokens, channels]``; None is skipped."""


class PlainOperator:
    """Softmax attention by fused kernels in both directions.

    A^T X is attention with queries and keys exchanged and each row of X divided by its own normaliser. The
    kernel's normalisation is undone by an anchor: one more key whose score is known, with a value channel of
    its own, so that every row returns the anchor's share. The rows' normalisers, as log-sum-exp, come from an
    anchor in the first forward product. Heads whose scores are too far apart for that carry the anchor's
    score or the normaliser as one more dimension of queries and keys.

    Tokens and anchor together are padded to a length that suits the kernels: under a causal mask by rows at
    the end, which nothing attends to, otherwise by more anchors. The first rows of a causal map, where an
    anchor would get nearly all weight, are computed directly.
    """

    def __init__(self, query: Tensor, key: Tensor, *, causal: bool, scale: float) -> None:
        """query and key ``[heads, tokens, dim]`` of one type."""
        self.query, self.key, self.causal, self.scale = query, key, causal, scale
        self.precision = torch.promote_types(query.dtype, torch.float32)
        tokens = query.shape[1]
        step = ROW_STEPS.get(query.device.type, 1)
        self._length = -(-(tokens + 1) // step) * step
        self._anchors = 1 if causal else self._length - tokens
        self._partition: Tensor | None = None
        self._swapped: tuple[Tensor, Tensor] | None = None
        self._weights: Tensor | None = None
        self._unit: Tensor | float = 1 / self._anchors

    def rows(self, positions: Tensor) -> Tensor:
        return score_rows(self.query[:, positions], self.key, positions, self.causal, self.scale).softmax(-1)

    def sweep(self, forward: Tensor | None, backward: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        output = None
        if backward is not None and self._partition is None:
            output = self._first_forward(forward)
        elif forward is not None:
            output = _fused(self.query, self.key, forward, self.causal, self.scale)
        return output, None if backward is None else self._backward(backward)

    def _first_forward(self, values: Tensor | None) -> Tensor | None:
        """``A @ values``, which also computes each row's log-sum-exp ``[heads, tokens]``."""
        if values is None:
            values = self.query.new_zeros(*self.query.shape[:2], 0)
        early = self._early_scores()
        output, share = self._anchored(values)
        partition = self._log_sum_exp(share, early)
        taken, low, high = torch.stack([share.amax(), *partition.aminmax()]).tolist()
        in_range = taken < 0.9 and low > -50 and high < 60 and high - low < 50
        if not in_range:
            bound = self._lower_bounds().to(self.query.dtype)
            output, share = self._anchored(values, bound)
            partition = self._log_sum_exp(share, early, bound.to(share.dtype) * self.scale)
            self._recompute_underflown(partition, share)
        self._partition = partition
        if in_range:
            lowest = partition.amin(-1, keepdim=True)
            self._weights = self._in_order((lowest - partition).exp_()[..., None])
            self._unit = lowest.exp_() / self._anchors
        if not values.shape[-1]:
            return None
        output.div_((1 - share)[..., None])
        if early is not None:
            first = slice(0, early.shape[-1])
            output[:, first] = early.softmax(-1) @ values[:, first].to(early.dtype)
        return output

    def _anchored(self, values: Tensor, bound: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attention with anchors as the first keys, and the share ``[heads, tokens]`` that they take.

        The anchors' score is zero, or for each row its ``bound [heads, tokens]`` times the scale.
        """
        dim, channels = self.query.shape[-1], values.shape[-1]
        width = _full_width(dim + (bound is not None), channels + 1)
        queries, keys_and_anchors = self._query_rows(self.query, width), self._key_rows(self.key, width)
        if bound is not None:
            self._real_rows(queries)[..., dim] = bound
            keys_and_anchors[:, : self._anchors, dim] = 1.0
        values_and_share = self._key_rows(values, width)
        values_and_share[:, : self._anchors, channels] = 1.0
        output = self._real_rows(_fused(queries, keys_and_anchors, values_and_share, self.causal, self.scale))
        share = output[..., channels].to(self.precision, copy=True)
        if self.causal:
            share[:, :EARLY] = 0.5  # computed directly, so their share is ignored below
        return output[..., :channels], share

    def _query_rows(self, states: Tensor, width: int) -> Tensor:
        """Queries for the kernel; under a causal mask as many rows as there are keys."""
        return self._key_rows(states, width) if self.causal else _widened(states, width)

    def _key_rows(self, states: Tensor, width: int) -> Tensor:
        """States after the anchors' rows, zero-padded to ``[heads, length, width]``."""
        padded = states.new_zeros(len(states), self._length, width)
        self._after_anchors(padded)[..., : states.shape[-1]] = states
        return padded

    def _after_anchors(self, states: Tensor) -> Tensor:
        return states[:, self._anchors : self._anchors + self.query.shape[1]]

    def _real_rows(self, states: Tensor) -> Tensor:
        """Rows of real tokens among the kernel's queries or its output."""
        return self._after_anchors(states) if self.causal else states

    def _early_scores(self) -> Tensor | None:
        """Scores of the first rows of a causal map, ``[heads, EARLY or fewer, the same]``."""
        if not self.causal:
            return None
        query, key = self.query[:, :EARLY], self.key[:, :EARLY]
        return score_rows(query, key, torch.arange(query.shape[1], device=query.device), True, self.scale)

    def _log_sum_exp(self, share: Tensor, early: Tensor | None, score: Tensor | float = 0.0) -> Tensor:
        """The rows' normalisers from the share of anchors with the given score, early ones directly."""
        partition = score + math.log(self._anchors) - torch.logit(share)
        if early is not None:
            partition[:, : early.shape[-1]] = early.logsumexp(-1)
        return partition

    def _lower_bounds(self) -> Tensor:
        """Per row a bound on the log-sum-exp from the mean score (Jensen's inequality), over the scale.

        Several anchors share it.
        """
        keys = self.key.to(self.precision)
        tokens = keys.shape[1]
        if self.causal:
            seen = torch.arange(1, tokens + 1, device=keys.device, dtype=keys.dtype)
            return (self.query * (keys.cumsum(1) / seen[:, None])).sum(-1) + seen.log() / self.scale
        crowd = math.log(tokens / self._anchors)
        return (self.query * keys.mean(1, keepdim=True)).sum(-1) + crowd / self.scale

    def _recompute_underflown(self, partition: Tensor, share: Tensor) -> None:
        """Compute rows directly where the anchors' share underflowed."""
        lost = (share <= torch.finfo(self.query.dtype).tiny * 16).any(0).nonzero()[:, 0]
        step = max(1, TILE_BYTES // (4 * self.key.shape[0] * self.key.shape[1]))
        for positions in lost.split(step):
            scores = score_rows(self.query[:, positions], self.key, positions, self.causal, self.scale)
            partition[:, positions] = scores.logsumexp(-1)

    def _backward(self, states: Tensor) -> Tensor:
        channels = states.shape[-1]
        queries, keys_and_anchors = self._swapped_states(channels)
        values_and_share = keys_and_anchors.new_zeros(*keys_and_anchors.shape[:2], queries.shape[-1])
        values_and_share[:, : self._anchors, channels] = 1.0
        part = self._after_anchors(values_and_share)[..., :channels]
        states = self._in_order(states)
        if self._weights is None:
            part.copy_(states)
        else:
            torch.mul(states, self._weights, out=part)
        del states
        output = self._real_rows(_fused(queries, keys_and_anchors, values_and_share, self.causal, self.scale))
        del values_and_share, part
        share = output[..., channels].to(self.precision) * self._unit
        return self._in_order(output[..., :channels].div_(share[..., None]))

    def _swapped_states(self, channels: int) -> tuple[Tensor, Tensor]:
        """Keys as queries and queries as keys, cached for the next product of the same width."""
        assert self._partition is not None
        parts = []
        if self._weights is None:
            parts = _split(-self._partition / self.scale, self.query.dtype)
        dim = self.query.shape[-1]
        width = _full_width(dim + len(parts), channels + 1)
        if self._swapped is None or self._swapped[0].shape[-1] != width:
            queries = self._query_rows(self._in_order(self.key), width)
            keys_and_anchors = self._key_rows(self._in_order(self.query), width)
            for index, part in enumerate(parts, dim):
                self._real_rows(queries)[..., index] = 1.0
                self._after_anchors(keys_and_anchors)[..., index] = self._in_order(part)
            self._swapped = queries, keys_and_anchors
        return self._swapped

    def _in_order(self, states: Tensor) -> Tensor:
        """``[heads, tokens, ...]`` in the order in which the transposed map is causal: from the end."""
        return states.flip(1) if self.causal else states


class SimilarityOperator:
    """ElemMul without causality, row-normalised A A^T, as products with A."""

    def __init__(self, plain: PlainOperator) -> None:
        self.plain, self.causal = plain, False
        ones = plain.query.new_ones(*plain.query.shape[:2], 1)
        self.total = self._similarity_product(ones)

    def rows(self, positions: Tensor) -> Tensor:
        rows = self.plain.rows(positions)
        alike, _ = self.plain.sweep(rows.transpose(-1, -2).to(self.plain.query.dtype), None)
        assert alike is not None
        alike = alike.to(rows.dtype).transpose(-1, -2)
        return alike / alike.sum(-1, keepdim=True)

    def sweep(self, forward: Tensor | None, backward: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        output = None if forward is None else self._similarity_product(forward) / self.total
        return output, None if backward is None else self._similarity_product(backward / self.total)

    def _similarity_product(self, states: Tensor) -> Tensor:
        _, gathered = self.plain.sweep(None, states)
        assert gathered is not None
        spread, _ = self.plain.sweep(gathered, None)
        assert spread is not None
        return spread


def score_rows(query: Tensor, key: Tensor, positions: Tensor, causal: bool, scale: float) -> Tensor:
    """Scores of the queries at ``positions``, masked keys at -inf: ``[heads, positions, tokens]``."""
    precision = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(precision) * scale) @ key.to(precision).transpose(-1, -2)
    if causal:
        hidden = torch.arange(key.shape[1], device=key.device) > positions[:, None]
        scores.masked_fill_(hidden, float("-inf"))
    return scores


def _fused(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """Torch's own attention on ``[heads, tokens, dim]``; padded to one width, for fast kernels."""
    channels = value.shape[-1]
    width = _full_width(query.shape[-1], channels)
    query, key, value = (_widened(part, width)[None] for part in (query, key, value))
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
    return output[0, ..., :channels]


def _full_width(*channels: int) -> int:
    """The smallest width of fast kernels that holds the channels."""
    return -(-max(channels) // 8) * 8


def _widened(states: Tensor, width: int) -> Tensor:
    """States zero-padded to ``width`` channels."""
    missing = width - states.shape[-1]
    return functional.pad(states, (0, missing)) if missing else states


def _split(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of a short type that add up to ``values`` closely enough for an exponent."""
    first = values.to(dtype)
    if torch.finfo(dtype).bits >= 32:
        return [first]
    return [first, (values - first.to(values.dtype)).to(dtype)]

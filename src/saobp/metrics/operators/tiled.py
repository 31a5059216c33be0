"""Attention under any refinement and mask as an operator: tiles are recomputed for each product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from saobp.metrics.operators.plain import TILE_BYTES, score_rows
from saobp.propagation.beliefs import Beliefs
from saobp.propagation.factors import Factor, get_factor
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import head_strength, refine_scores
from saobp.refinement import Refinement

TEMPORARIES = 6
"""Tile-sized tensors that propagation holds at once."""


@dataclass(frozen=True)
class RowBlockGraph(FactorGraph):
    """Some rows of a graph in which every row receives all messages; ``past`` is the sum over all rows."""

    def incoming(self, messages: Tensor, *, include_own: bool = False) -> Tensor:
        assert self.past is not None
        return self.past if include_own else self.past - self.mask_messages(messages)


@dataclass(frozen=True)
class Mask:
    """The mask of one text, whether its rows receive messages of earlier rows alone, and a bound on scores.

    visible and bias are ``[heads or 1, tokens, tokens]``; None means no restriction.
    """

    causal: bool = False
    window: int | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    causal_messages: bool = False
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether fused kernels support this mask."""
        return self.window is None and self.visible is None and self.bias is None and self.softcap is None

    def rows(self, positions: Tensor, tokens: int) -> Tensor | None:
        """Visible keys of the rows at ``positions``, broadcastable to ``[heads, positions, tokens]``."""
        seen = None if self.visible is None else self.visible[:, positions]
        distance = positions[:, None] - torch.arange(tokens, device=positions.device)
        if self.causal:
            seen = distance >= 0 if seen is None else seen & (distance >= 0)
        if self.window is not None:
            near = distance.abs() < self.window
            seen = near if seen is None else seen & near
        return seen


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores bounded softly, as in Gemma 2; as they are without a bound."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


class TiledOperator:
    """Rows under any mask, refined by a factor whose messages depend on one row each, or not at all.

    Without causality the messages are summed per key first, in one sweep per step. With strict causality the
    sums grow from row to row, so every sweep goes through the text in order.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        refinement: Refinement,
        strength: Tensor,
        mask: Mask,
        *,
        scale: float,
        message_sums: Tensor | None = None,
    ) -> None:
        """query and key ``[heads, tokens, dim]``; strength ``[heads]``.

        ``message_sums [steps, heads, tokens]`` is the sum of all rows' messages, if already known.
        """
        factor = get_factor(refinement.factor)
        self.precision = torch.promote_types(query.dtype, torch.float32)
        self.strength = head_strength(strength, query.new_empty(0, dtype=self.precision))
        if factor is not None and not messages_are_rowwise(factor, self.strength, key.shape[1]):
            raise ValueError(
                f"the sampled method cannot take {refinement.factor!r} apart row by row"
                f"{' under this mask' if refinement.factor == 'elemmul' else ''}: use method='exact'"
            )
        self.query, self.key, self.mask, self.scale = query, key, mask, scale
        self.causal = mask.causal
        self.refinement = refinement
        self.causal_messages = factor is not None and mask.causal_messages
        self.message_sums = message_sums
        if factor is not None and not self.causal_messages and message_sums is None:
            self._sum_messages()

    def rows(self, positions: Tensor) -> Tensor:
        if not self.causal_messages:
            return self._beliefs(positions).rows
        output = self.query.new_empty(
            len(self.query), len(positions), self.key.shape[1], dtype=self.precision
        )
        for tile, rows in self._tiles():
            here = ((positions >= tile[0]) & (positions <= tile[-1])).nonzero()[:, 0]
            output[:, here] = rows[:, positions[here] - tile[0]]
        return output

    def sweep(self, forward: Tensor | None, backward: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        output = None if forward is None else torch.empty_like(forward)
        gathered = None if backward is None else torch.zeros_like(backward, dtype=self.precision)
        for tile, rows in self._tiles():
            if output is not None and forward is not None:
                output[:, tile] = (rows @ forward.to(rows.dtype)).to(output.dtype)
            if gathered is not None and backward is not None:
                gathered += rows.transpose(-1, -2) @ backward[:, tile].to(rows.dtype)
        return output, None if gathered is None or backward is None else gathered.to(backward.dtype)

    def _tiles(self) -> Iterator[tuple[Tensor, Tensor]]:
        past = None
        for tile in self._row_blocks():
            if not self.causal_messages:
                yield tile, self._beliefs(tile).rows
                continue
            graph = FactorGraph(self._visible(tile), causal=True)
            rows, past = refine_scores(self._scores(tile), self.refinement, self.strength, graph, past, True)
            yield tile, rows

    def _sum_messages(self) -> None:
        """Sum the messages of all rows, ``[steps, heads, tokens]``; each step builds on the one before."""
        (heads, tokens), stride = self.key.shape[:2], self.refinement.message_stride
        self.message_sums = self.query.new_zeros(self.refinement.steps, heads, tokens, dtype=self.precision)
        for step in range(self.refinement.steps):
            total = torch.zeros_like(self.message_sums[step])
            for positions in self._row_blocks():
                sending = positions[positions % stride == 0]
                messages = self._beliefs(sending, keep_messages=True).messages
                assert messages is not None
                total += messages[step]
            self.message_sums[step] = total * (tokens / -(-tokens // stride))

    def _beliefs(self, positions: Tensor, keep_messages: bool = False) -> Beliefs:
        scores, graph = self._scores(positions), RowBlockGraph(self._visible(positions))
        return refine_scores(scores, self.refinement, self.strength, graph, self.message_sums, keep_messages)

    def _scores(self, positions: Tensor) -> Tensor:
        scores = score_rows(self.query[:, positions], self.key, positions, False, self.scale)
        scores = capped(scores, self.mask.softcap)
        return scores if self.mask.bias is None else scores + self.mask.bias[:, positions]

    def _visible(self, positions: Tensor) -> Tensor | None:
        return self.mask.rows(positions, self.key.shape[1])

    def _row_blocks(self) -> tuple[Tensor, ...]:
        heads, tokens = self.key.shape[:2]
        step = max(1, TILE_BYTES // (TEMPORARIES * heads * tokens * self.precision.itemsize))
        return torch.arange(tokens, device=self.key.device).split(step)


def messages_are_rowwise(factor: Factor, strength: Tensor, tokens: int) -> bool:
    """Whether a row's messages are the same without the other rows; strength ``[heads, 1, 1]``."""
    beliefs = torch.linspace(-1, 1, 2 * tokens, dtype=strength.dtype, device=strength.device)
    beliefs = beliefs.view(2, tokens).sin().softmax(-1).expand(len(strength), -1, -1)
    together = factor.log_messages(beliefs, strength)
    alone = factor.log_messages(beliefs[:, :1], strength)
    return together.shape == beliefs.shape and torch.equal(alone, together[:, :1])

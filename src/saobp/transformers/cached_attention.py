"""A call of attention with a key-value cache: rows receive messages of earlier calls and add their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import reference_attention, share_heads
from saobp.refinement import Refinement
from saobp.transformers.cache import MessageCacheLayer
from saobp.transformers.masks import graph_of


@dataclass(slots=True)
class Prefill:
    """A causal call on an empty cache, whose messages only later calls need."""

    query: Tensor
    key: Tensor
    refinement: Refinement
    strength: Tensor
    mask: Tensor | None
    scaling: float | None
    window: int | None = None

    def compute_messages(self, messages: MessageCacheLayer) -> None:
        keys = self.key.shape[-2]
        graph, _ = graph_of(self.mask, self.query, keys, self.refinement, True, self.window)
        call = self.query, self.key, self.key, self.refinement, self.strength, graph
        cached_attention(*call, messages, scale=self.scaling)


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    strength: Tensor,
    graph: FactorGraph,
    messages: MessageCacheLayer,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    wants_rows: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Output and, if requested, rows of a cached call; stores new totals in ``messages``.

    Returned rows are those that the output is computed from, so that gradients reach them.
    """
    past, history, chunks = messages.past, [], []
    for start, stop in messages.row_chunks(query.shape[-2]):
        chunk = FactorGraph(
            _rows(graph.visible, start, stop), _rows(graph.speaks, start, stop), causal=graph.causal
        )
        done = reference_attention(
            query[:, :, start:stop],
            key,
            value,
            refinement,
            strength if strength.ndim == 1 or strength.shape[-2] == 1 else strength[..., start:stop, :],
            chunk,
            bias=_rows(bias, start, stop),
            dropout_p=dropout_p,
            scale=scale,
            past=past,
            keep_messages=True,
        )
        past = done.messages
        assert past is not None
        history.append(past)
        chunks.append(done if wants_rows else done._replace(rows=done.output))
    messages.store(history)
    if len(chunks) == 1:
        return chunks[0].output, chunks[0].rows if wants_rows else None
    if not wants_rows:
        return torch.cat([done.output for done in chunks], -2), None
    rows = torch.cat([done.rows for done in chunks], -2)
    return functional.dropout(rows, dropout_p) @ share_heads(value, query.shape[1]), rows


def _rows(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[-2] == 1 else tensor[..., start:stop, :]

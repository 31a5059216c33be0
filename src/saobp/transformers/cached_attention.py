"""A call of attention with a key-value cache: rows receive messages of earlier calls and add their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saobp.kernels.calls import POTTS, Call
from saobp.kernels.dispatch import decoding_obstacle
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import reference_attention, weighted_values
from saobp.refinement import Refinement
from saobp.transformers.cache import MessageCacheLayer
from saobp.transformers.masks import graph_of


@dataclass(slots=True)
class Prefill:
    """A causal call on an empty cache. Only later calls need its messages, which are not computed before."""

    query: Tensor
    key: Tensor
    refinement: Refinement
    strength: Tensor
    mask: Tensor | None
    scaling: float | None
    window: int | None = None

    def compute_messages(self, messages: MessageCacheLayer) -> None:
        """Compute them by the reference and store them in ``messages``."""
        keys = self.key.shape[-2]
        graph, _ = graph_of(self.mask, self.query, keys, self.refinement, True, self.window)
        call = self.query, self.key, self.key, self.refinement, self.strength, graph
        cached_attention(*call, messages, scale=self.scaling)


def fused_step_obstacle(
    query: Tensor, key: Tensor, value: Tensor, refinement: Refinement, strength: Tensor, mask: Tensor | None,
    messages: MessageCacheLayer | None, dropout_p: float,
) -> str | None:  # fmt: skip
    """Why the decoding kernels do not take a call with a cache; None if they do."""
    if messages is None or messages.past is None:
        return "no row before it has sent messages"
    if strength.ndim != 1:
        return "its strengths are not one per head"
    if mask is None or not _is_key_mask(mask, query, key):
        return "its mask says something else than which keys one row sees"
    states = (query, key, value, strength)
    if torch.is_grad_enabled() and any(state.requires_grad for state in states):
        return "a decoding step of the kernels has no gradient"
    call = Call(
        query.shape, key.shape, value.shape, query.dtype, query.device.type, refinement, is_causal=True,
        dropout_p=dropout_p,
    )  # fmt: skip
    return decoding_obstacle(call)


def _is_key_mask(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask is of one row for all heads: bool or int8 ``[batch or 1, 1, 1, keys or more]``."""
    return (
        isinstance(mask, Tensor)
        and mask.ndim == 4
        and mask.dtype in (torch.bool, torch.int8)
        and mask.shape[0] in (1, query.shape[0])
        and mask.shape[1:3] == (1, 1)
        and mask.shape[3] >= key.shape[2]
    )


def fused_step(
    query: Tensor, key: Tensor, value: Tensor, refinement: Refinement, strength: Tensor, mask: Tensor,
    messages: MessageCacheLayer, scale: float | None,
) -> Tensor:  # fmt: skip
    """Output ``[batch, heads, 1, dim]`` by the kernels; stores the new sums of messages in ``messages``.

    query ``[batch, heads, 1, dim]``, key and value ``[batch, key_heads, keys, dim]``, strength ``[heads]``,
    mask ``[batch or 1, 1, 1, keys or more]``
    """
    from saobp.kernels.decoding.launch import decoding_step

    assert messages.past is not None
    output, totals = decoding_step(
        query, key, value, strength, messages.past[0], mask,
        query.shape[-1] ** -0.5 if scale is None else scale, POTTS[refinement.factor][0],
    )  # fmt: skip
    messages.store([totals[None]])
    return output


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
    """Output and, if requested, rows of a cached call; stores the new sums of messages in ``messages``.

    query and output ``[batch, heads, queries, dim]``, key and value ``[batch, key_heads, keys, dim]``,
    rows ``[batch, heads, queries, keys]``; strength and bias as in ``reference_attention``

    Returned rows are those that the output is computed from, so that gradients reach them.
    """
    past, history, chunks = messages.past_of(key.shape[-2]), [], []
    for start, stop in messages.row_chunks(query.shape[-2]):
        chunk = FactorGraph(
            _rows(graph.visible, start, stop), _rows(graph.senders, start, stop), causal=graph.causal
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
    return weighted_values(rows, value, dropout_p), rows


def _rows(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[-2] == 1 else tensor[..., start:stop, :]

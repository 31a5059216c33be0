"""Reference implementation of refined attention, with the whole map in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from saobp.propagation.beliefs import propagate
from saobp.propagation.factors import get_factor
from saobp.propagation.graph import FactorGraph
from saobp.refinement import MAX_STRENGTH, Refinement


class Attended(NamedTuple):
    """output ``[batch, heads, queries, dim]``, rows ``[.., queries, keys]``, messages as in Beliefs."""

    output: Tensor
    rows: Tensor
    messages: Tensor | None


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    strength: Tensor,
    graph: FactorGraph,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    past: Tensor | None = None,
    keep_messages: bool = False,
) -> Attended:
    """Attention with refined rows; query ``[batch, heads, queries, dim]``, key heads may be fewer.

    strength ``[heads]``, or of rows and keys as in ``head_strength``; ``bias`` is added to the scores. Scores
    use the inputs' precision, softmax and messages at least float32, as in Transformers' eager attention.
    """
    key, value = share_heads(key, query.shape[1]), share_heads(value, query.shape[1])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores = scores + bias
    rows, messages = propagate(
        scores,
        get_factor(refinement.factor),
        head_strength(strength, scores),
        graph,
        steps=refinement.steps,
        damping=refinement.damping,
        message_stride=refinement.message_stride,
        past=past,
        keep_messages=keep_messages,
    )
    rows = rows.to(query.dtype)
    output = torch.matmul(functional.dropout(rows, dropout_p) if dropout_p else rows, value)
    return Attended(output, rows, messages)


def share_heads(states: Tensor, heads: int) -> Tensor:
    """Repeat ``[batch, key_heads, length, dim]`` so that every query head has its own keys."""
    groups = heads // states.shape[1]
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def head_strength(strength: Tensor, like: Tensor | torch.dtype) -> Tensor:
    """``[heads]`` as ``[heads, 1, 1]`` in the precision of the scores, clamped so that gamma stays below 1.

    ``[steps, heads]`` becomes ``[steps, 1, heads, 1, 1]``; ``[steps or 1, batch or 1, heads, queries or 1,
    keys or 1]`` keeps its shape.
    """
    strength = strength.to(like).clamp(-MAX_STRENGTH, MAX_STRENGTH)
    if strength.ndim == 2:
        return strength[:, None, :, None, None]
    return strength.view(-1, 1, 1) if strength.ndim == 1 else strength

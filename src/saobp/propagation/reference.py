"""Reference implementation of refined attention, with the whole map in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from saobp.propagation.beliefs import Beliefs, propagate
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
    scores = scaled_scores(query, key, bias, scale)
    strength = head_strength(strength, scores)
    rows, messages = refine_scores(scores, refinement, strength, graph, past, keep_messages)
    rows = rows.to(query.dtype)
    return Attended(weighted_values(rows, value, dropout_p), rows, messages)


def scaled_scores(query: Tensor, key: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    """Scores ``[batch, heads, queries, keys]`` plus the bias, in at least float32."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, share_heads(key, query.shape[1]).transpose(-1, -2)) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores if bias is None else scores + bias


def weighted_values(rows: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """Rows, after dropout, times values; value heads may be fewer."""
    rows = functional.dropout(rows, dropout_p) if dropout_p else rows
    return torch.matmul(rows, share_heads(value, rows.shape[1]))


def refine_scores(
    scores: Tensor,
    refinement: Refinement,
    strength: Tensor,
    graph: FactorGraph,
    past: Tensor | None = None,
    keep_messages: bool = False,
) -> Beliefs:
    """:func:`propagate` with the factor, steps and damping of a refinement."""
    return propagate(
        scores, get_factor(refinement.factor), strength, graph, steps=refinement.steps,
        damping=refinement.damping, message_stride=refinement.message_stride,
        past=past, keep_messages=keep_messages,
    )  # fmt: skip


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

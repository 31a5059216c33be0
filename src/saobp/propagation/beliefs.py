"""Belief propagation on the rows of attention, in plain PyTorch: the specification of every faster path."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from saobp.propagation.factors import Factor
from saobp.propagation.graph import FactorGraph


class Beliefs(NamedTuple):
    """Refined rows ``[..., node, label]`` and, if requested, the log messages for later nodes.

    ``messages`` is ``[steps, ..., label]``: for each step the sum over all nodes so far.
    """

    rows: Tensor
    messages: Tensor | None


def propagate(
    scores: Tensor,
    factor: Factor | None,
    strength: Tensor,
    graph: FactorGraph,
    *,
    steps: int = 1,
    damping: float = 0.0,
    message_stride: int = 1,
    past: Tensor | None = None,
    keep_messages: bool = False,
) -> Beliefs:
    """Softmax of ``scores`` refined by ``steps`` of belief propagation.

    scores ``[..., node, label]``, strength broadcastable to it, or one such for each step in a leading
    dimension, the last for all further steps. The prior stays the softmax; messages come
    from the current beliefs (the dense-graph form of loopy propagation). ``past`` is what
    ``keep_messages`` returned for earlier nodes, extended with zeros for new labels: ``[steps, ..., label]``.
    Everything stays in the precision of ``scores``, also under autocast.
    """
    with without_autocast(scores.device.type):
        log_prior = torch.log_softmax(graph.mask_scores(scores), -1)
        prior = beliefs = graph.mask_rows(log_prior.exp())
        if factor is None:
            return Beliefs(prior, None)
        if (why := factor.obstacle(scores.shape[-2], scores.shape[-1], graph.causal)) is not None:
            raise ValueError(why)
        totals = []
        for step in range(steps):
            step_strength = (
                strength[min(step, len(strength) - 1)] if strength.ndim > scores.ndim else strength
            )
            if keep_messages:
                sent = graph.mask_messages(factor.log_messages(beliefs, step_strength)).sum(-2)
                totals.append(sent if past is None else sent + past[step])
            earlier = None if past is None else past[step].unsqueeze(-2)
            step_graph = replace(graph, past=earlier, stride=message_stride)
            log_belief = factor.log_belief(log_prior, beliefs, step_strength, step_graph)
            updated = graph.mask_rows(torch.softmax(graph.mask_scores(log_belief), -1))
            beliefs = updated if damping == 0 or steps == 1 else torch.lerp(updated, beliefs, damping)
        return Beliefs(beliefs, torch.stack(totals) if keep_messages else None)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Keeps products in the precision of their inputs. Meta tensors have no autocast."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)

"""Attention rollout, for comparison: direct and residual paths through all layers, as one map."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saobp.metrics.functional.gtd import averaged_heads
from saobp.propagation.beliefs import without_autocast


def rollout(layers: Sequence[Tensor], *, residual: float = 0.5, padding_mask: Tensor | None = None) -> Tensor:
    """Where each token's last state comes from, ``[batch, length, length]``: output rows, input columns.

    layers are maps ``[batch, heads, length, length]`` from first to last. Each is averaged over heads and
    mixed with the identity (``residual``, the share of the skip connection), then all are multiplied.
    GTD in contrast leaves out single steps and skips, is of one head, and is one number.
    Padding tokens have zero rows and columns.
    """
    if not layers:
        raise ValueError("rollout needs the maps of at least one layer")
    if not 0 <= residual < 1:
        raise ValueError(f"residual must lie from 0 up to but not including 1, not {residual}")
    flow: Tensor | None = None
    for rows in averaged_heads(layers, padding_mask):
        identity = torch.diag_embed(rows.sum(-1))
        mixed = (1 - residual) * rows + residual * identity
        with without_autocast(mixed.device.type):
            flow = mixed if flow is None else mixed @ flow
    assert flow is not None
    return flow

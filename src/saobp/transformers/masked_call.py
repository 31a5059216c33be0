"""Calls without causality whose mask is not only padding, by kernels in linear memory."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from saobp.arguments import read_strength, read_window
from saobp.functional import remembered_nodes
from saobp.kernels.calls import Call, Path
from saobp.kernels.dispatch import select
from saobp.refinement import Refinement
from saobp.transformers.masks import SEEN_BY_PADDING, check_mask, check_two_way, read_mask
from saobp.transformers.packed_sequences import are_sequences, same_sequence

States = tuple[Tensor, Tensor, Tensor]
"""Query ``[batch, heads, length, dim]``, key and value ``[batch, key_heads, length, dim]``."""


def masked_path(
    states: States,
    refinement: Refinement,
    strength: Tensor,
    mask: Tensor | None,
    window: int | None,
    *,
    dropout_p: float,
    scale: float | None,
) -> Path:
    """The path of a bidirectional call on as many queries as keys; arguments as :func:`masked_output`."""
    length = states[0].shape[-2]
    if mask is not None and not are_sequences(mask):
        check_mask(mask, length, length)
    bias = mask if mask is not None and mask.is_floating_point() else None
    call = Call.of(
        *states, refinement, strength, dropout_p=dropout_p, scale=scale, strongest=refinement.strongest,
        window=_window(window, mask, length), has_attn_mask=mask is not None, bias=bias,
    )  # fmt: skip
    return select(call)


def masked_output(
    states: States,
    refinement: Refinement,
    strength: Tensor,
    mask: Tensor | None,
    window: int | None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Refined attention ``[batch, heads, length, dim]`` if :func:`masked_path` is fused.

    strength: as ``read_strength`` takes it, such as ``[heads]``
    mask: None; ``[batch, 1 or heads, 1 or length, length or more]``, bool, numbers to add, or int8 as
    ``masks.saobp_mask`` makes it; or int64 ``[batch, length]``, the number of each token's packed sequence
    """
    from saobp.kernels.masked.attention import masked_attention

    length, nodes = states[0].shape[-2], None
    window = _window(window, mask, length)
    query = states[0]
    strength, _ = read_strength(refinement, strength, query.shape[1], query.device, by_step=True)
    if are_sequences(mask):
        mask = same_sequence(mask)
    elif mask is not None:
        nodes = remembered_nodes(mask, (length, refinement.factor), partial(_nodes, mask, length, refinement))
        mask = mask[..., :length]
    return masked_attention(
        *states, refinement, strength, nodes=nodes, mask=mask, window=window,
        dropout_p=dropout_p, scale=scale,
    )  # fmt: skip


def _window(window: int | None, mask: Tensor | None, length: int) -> int | None:
    """The window that kernels apply: None with a 4-D mask, which already hides what is outside of it."""
    return read_window(window, length, length) if mask is None or are_sequences(mask) else None


def _nodes(mask: Tensor, length: int, refinement: Refinement) -> Tensor:
    """Whether each token is real, bool ``[.., length]``; raises on a mask that is not symmetric.

    Padding has SEEN_BY_PADDING in its row of an int8 mask; under other masks no row sees it.
    """
    mask = mask[..., :length]
    graph, _ = read_mask(mask, length, length)
    check_two_way(graph, length, refinement)
    if mask.dtype == torch.int8:
        return ~(mask == SEEN_BY_PADDING).any(-1)
    seen = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask
    return seen.any(-2)

"""Calls without causality whose mask says more than padding, by kernels in linear memory."""

from __future__ import annotations

import torch
from torch import Tensor

from saobp.arguments import read_strength, read_window
from saobp.kernels.dispatch import Call, Path, select
from saobp.refinement import Refinement
from saobp.transformers.masks import SEEN_BY_PADDING, check_mask
from saobp.transformers.packed_sequences import are_sequences, same_sequence

States = tuple[Tensor, Tensor, Tensor]


def masked_path(
    states: States,
    refinement: Refinement,
    strength: Tensor,
    mask: Tensor | None,
    window: int | None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Path:
    """The path of a bidirectional call on as many queries as keys; arguments as :func:`masked_output`."""
    length = states[0].shape[-2]
    if mask is not None and not are_sequences(mask):
        check_mask(mask, length, length)
    learns = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    call = Call.of(
        *states, refinement, strength, dropout_p=dropout_p, scale=scale, strongest=refinement.strongest,
        window=_window(window, mask, length), has_attn_mask=mask is not None, bias_learns=learns,
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

    mask: of this implementation or the user's, as ``masks.read_mask`` and packed sequences have it.
    """
    from saobp.kernels.masked.attention import masked_attention

    length, nodes = states[0].shape[-2], None
    window = _window(window, mask, length)
    query = states[0]
    strength, _ = read_strength(refinement, strength, query.shape[1], query.device, by_step=True)
    if are_sequences(mask):
        mask = same_sequence(mask)
    elif mask is not None:
        mask = mask[..., :length]
        nodes = _nodes(mask)
    return masked_attention(
        *states, refinement, strength, nodes=nodes, mask=mask, window=window,
        dropout_p=dropout_p, scale=scale,
    )  # fmt: skip


def _window(window: int | None, mask: Tensor | None, length: int) -> int | None:
    """The window of a call. A 4-D mask holds it already."""
    return read_window(window, length, length) if mask is None or are_sequences(mask) else None


def _nodes(mask: Tensor) -> Tensor:
    """Tokens that are nodes, bool ``[.., length]``: not padding, which the mask marks or no row sees."""
    if mask.dtype == torch.int8:
        return ~(mask == SEEN_BY_PADDING).any(-1)
    seen = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask
    return seen.any(-2)

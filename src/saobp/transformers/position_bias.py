"""A bias of relative positions on the scores, as in MPNet and the T5 family, as part of the mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_biased_masks = WeakTensorKeyDictionary()


def biased_mask(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """A mask of numbers ``[batch, heads, queries, keys]`` that adds the bias to the scores of visible keys.

    mask: None, ``[batch, keys]``, or ``[batch, 1 or heads, queries, keys]``; bool, or numbers to add
    bias: None, or ``[1 or batch, heads, queries, keys]``. Without one the mask is returned as it is.

    Layers share mask and bias, so they get one tensor, which is looked at once (``remembered_nodes``).
    """
    if bias is not None and bias.ndim != 4:
        raise ValueError(
            f"a position_bias must be [1 or batch, heads, queries, keys], not {tuple(bias.shape)}"
        )
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.ndim not in (2, 4):
        raise ValueError(
            f"saobp reads masks [batch, keys] or [batch, heads, queries, keys], not {tuple(mask.shape)}"
        )
    if torch.compiler.is_compiling() or bias.is_inference() or mask.is_inference():
        return _added(mask, bias)
    state = mask, mask._version, bias._version, torch.is_grad_enabled()
    cached = _biased_masks.get(bias)
    if cached is None or cached[0][0] is not mask or cached[0][1:] != state[1:]:
        cached = _biased_masks[bias] = (state, _added(mask, bias))
    biased: Tensor = cached[1]
    return biased


def _added(mask: Tensor, bias: Tensor) -> Tensor:
    """Bias plus the mask as numbers: a sum keeps no tensors for its gradient, so layers may be recomputed."""
    seen = mask[:, None, None, :] if mask.ndim == 2 else mask
    if not seen.is_floating_point():
        hidden = ~seen.bool()
        seen = torch.zeros_like(seen, dtype=bias.dtype).masked_fill_(hidden, torch.finfo(bias.dtype).min)
    return bias + seen

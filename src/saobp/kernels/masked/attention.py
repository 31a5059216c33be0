"""Entry point of the kernels for windows and masks."""

from __future__ import annotations

import torch
from torch import Tensor

from saobp.kernels.calls import POTTS
from saobp.kernels.masked.launch import masked_forward, masked_output
from saobp.kernels.runtime.custom_op import reject_forward_mode, requires_grad
from saobp.refinement import Refinement


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    strength: Tensor,
    *,
    nodes: Tensor | None = None,
    mask: Tensor | None = None,
    window: int | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Refined attention ``[batch, heads, length, dim]`` under a mask, a window, or both.

    query ``[batch, heads, length, dim]``, key and value ``[batch, key_heads, length, dim]``, strength ``[heads]``;
    nodes ``[batch or 1, heads or 1, length]``: False for padding, which sends no message and which no row sees;
    mask ``[batch or 1, heads or 1, length or 1, length]``: not 0 where a row may attend, or floating point, added to the
    scores, which may learn; window: a row sees keys less than this many places away. ``is_causal`` needs a window and no
    mask.
    """
    reject_forward_mode(query, key, value, strength)
    query, key, value = (one if one.stride(3) == 1 else one.contiguous() for one in (query, key, value))
    if nodes is not None:
        nodes = nodes.contiguous()
    if mask is not None and mask.dtype == torch.float64:
        mask = mask.float()
    sign, receives = POTTS[refinement.factor]
    seed = torch.randint(2**31, (1,), device=query.device) if dropout_p else None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    numbers = (window or 0, scale, dropout_p, sign, receives, is_causal)
    call = (query, key, value, strength.contiguous(), nodes, mask, seed, *numbers)
    mask_learns = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    if not mask_learns and not requires_grad(*call[:4]):
        only: Tensor = masked_output(*call)
        return only
    outputs: tuple[Tensor, Tensor] = masked_forward(*call)
    return outputs[0]

"""Entry point of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from saobp.kernels.bidirectional.launch import LONG
from saobp.kernels.bidirectional.short_launch import SHORT_FAMILY
from saobp.kernels.causal.launch import CAUSAL
from saobp.kernels.causal.short_launch import SHORT_CAUSAL
from saobp.kernels.dispatch import family, numbers_of
from saobp.kernels.elemmul.launch import ELEMMUL
from saobp.kernels.key_bias.launch import KEY_BIAS
from saobp.kernels.runtime.custom_op import reject_forward_mode
from saobp.kernels.steps.launch import STEPS
from saobp.kernels.steps.short_launch import SHORT_STEPS
from saobp.refinement import Refinement

FAMILIES = {
    one.family: one
    for one in (SHORT_FAMILY, LONG, KEY_BIAS, SHORT_CAUSAL, CAUSAL, ELEMMUL, STEPS, SHORT_STEPS)
}


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    strength: Tensor,
    *,
    strongest: float | None = None,
    padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    cumulative_lengths: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """Refined attention by the kernels; arguments as in :func:`saobp.attention`, already checked.

    ``strongest``: strengths are between 0 and this, if known without a device sync; ignored for strengths with
    gradient. A packed batch is one of batch size 1 with ``cumulative_lengths`` and the length of its ``longest`` sequence.
    """
    reject_forward_mode(query, key, value, strength)
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    _, _, length, dim = query.shape
    longest = length if longest is None else longest
    if padding_mask is not None:
        padding_mask = padding_mask.contiguous()
    kernels = FAMILIES[family(refinement, is_causal, longest, dim, query.dtype)]
    if strength.requires_grad:
        strongest = None
        if not kernels.has_strength:
            strength = strength.detach()
    numbers = numbers_of(refinement, longest, dim, scale, dropout_p, strongest)
    if refinement.steps > 1:
        strength = of_every_step(strength, refinement.steps)
    seed = torch.randint(2**31, (1,), device=query.device) if dropout_p else None
    strength = strength.contiguous()
    return kernels(query, key, value, strength, padding_mask, cumulative_lengths, seed, *numbers)


def of_every_step(strength: Tensor, steps: int) -> Tensor:
    """``[steps, heads]`` from ``[heads]`` or from fewer steps, of which the last is for all further ones."""
    if strength.ndim == 1:
        return strength.expand(steps, -1)
    return torch.cat([strength, strength[-1:].expand(steps - len(strength), -1)])

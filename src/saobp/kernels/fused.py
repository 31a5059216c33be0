"""The call into the kernels: which operator takes it, and in what numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saobp.kernels.bidirectional.operator import refined_attention
from saobp.kernels.bidirectional.short_operator import short_refined_attention, short_refined_output
from saobp.kernels.causal.operator import causal_refined_attention
from saobp.kernels.causal.short_operator import short_causal_refined_attention
from saobp.kernels.dispatch import POTTS, family
from saobp.kernels.elemmul.operator import elemmul_attention
from saobp.kernels.runtime.custom_op import learns, output_of, refuse_tangents
from saobp.refinement import MAX_STRENGTH, Refinement


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
    """Refined attention by the kernels; arguments as in :func:`saobp.attention`, checked already.

    ``strongest`` says that strengths lie from 0 to it, where that is known without asking the GPU; kernels that know
    a bound give the strength no gradient, so it only counts for one that does not learn. A packed batch is one of
    batch size 1 with ``cumulative_lengths`` and the length of its ``longest`` sequence.
    """
    refuse_tangents(query, key, value, strength)
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    _, _, length, dim = query.shape
    longest = length if longest is None else longest
    scale = dim**-0.5 if scale is None else scale
    strength = strength.contiguous()
    if padding_mask is not None:
        padding_mask = padding_mask.contiguous()
    learning = learns(query, key, value, strength)
    if refinement.factor == "elemmul":
        states = (query, key, value, padding_mask, cumulative_lengths, longest, scale)
        return output_of(elemmul_attention, states, learning=learning)
    sign, hears = POTTS[refinement.factor]
    if strongest is None or strength.requires_grad:
        bound = 0.0
    else:
        bound = -math.expm1(-sign * min(strongest, MAX_STRENGTH))
    seed = torch.randint(2**31, (1,), device=query.device) if dropout_p else None
    arguments = (
        query, key, value, strength, padding_mask, cumulative_lengths, seed,
        longest, scale, dropout_p, sign, hears, bound,
    )  # fmt: skip
    kernels = family(refinement.factor, is_causal, longest, dim, query.dtype)
    if kernels != "short":
        return output_of(OPERATORS[kernels], arguments, learning=learning)
    if learning:
        return short_refined_attention(*arguments)[0]
    return short_refined_output(*arguments)


OPERATORS = {
    "long": refined_attention,
    "causal": causal_refined_attention,
    "short causal": short_causal_refined_attention,
}

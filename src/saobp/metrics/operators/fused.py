"""Refined attention as an operator by the fused kernels, and the choice of operator for a call.

A^T X is the gradient of the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from saobp.kernels.calls import POTTS, Call
from saobp.kernels.dispatch import fused_obstacle
from saobp.metrics.operators.plain import AttentionOperator, PlainOperator, SimilarityOperator
from saobp.metrics.operators.tiled import Mask, TiledOperator
from saobp.refinement import Refinement

ROWS_AT_ONCE = 16
"""Single rows refined at a time; each needs several times its size in temporaries."""


class FusedOperator:
    """Products with refined maps where the kernels support them.

    The rows' normalisers and the keys' sums of messages do not depend on the values: they are cached, and
    each product is a single sweep. Single rows are computed from the same sums.
    """

    causal = False

    def __init__(
        self, query: Tensor, key: Tensor, refinement: Refinement, strength: Tensor, *, scale: float
    ) -> None:
        """query and key ``[heads, tokens, dim]``; strength ``[heads]``."""
        from saobp.kernels.bidirectional.launch import run_sums, saved_slices
        from saobp.kernels.call_spec import CallNumbers, CallSpec, CallTensors

        sign, receives = POTTS[refinement.factor]
        query, key = query.contiguous()[None], key.contiguous()[None]
        strength = strength.float()
        bound = -math.expm1(-sign * float(strength.abs().max()))
        numbers = CallNumbers(query.shape[2], scale, 0.0, sign, receives, bound)
        self.spec = CallSpec.of(CallTensors(query, key, query, strength), numbers)
        self.states = (query, key)
        self.strength = strength
        self.saved = run_sums(self.spec, query, key, strength)
        self.rows_known = False
        sums = None
        if receives:  # kernels use base-2 logarithms
            sums = saved_slices(self.spec)[0]["message_sums"].view(self.saved) * math.log(2)
        self.single_rows = TiledOperator(
            query[0], key[0], refinement, strength, Mask(), scale=scale, message_sums=sums
        )

    def rows(self, positions: Tensor) -> Tensor:
        return torch.cat([self.single_rows.rows(some) for some in positions.split(ROWS_AT_ONCE)], 1)

    def sweep(self, forward: Tensor | None, backward: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        output = None if forward is None else self._by_width(forward, self._forward_product)
        return output, None if backward is None else self._by_width(backward, self._transposed_product)

    def _by_width(self, states: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """The kernels take values as wide as keys: pads, and splits into chunks of that width."""
        parts = []
        width = self.spec.dim
        for part in states.split(width, -1):
            missing = width - part.shape[-1]
            padded = functional.pad(part, (0, missing)) if missing else part
            parts.append(product(padded[None].contiguous())[0, ..., : part.shape[-1]])
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _forward_product(self, values: Tensor) -> Tensor:
        from saobp.kernels.bidirectional.launch import run_output

        out = run_output(self.spec, *self.states, values, self.strength, self.saved)
        self.rows_known = True
        return out

    def _transposed_product(self, states: Tensor) -> Tensor:
        from saobp.kernels.bidirectional.launch import run_value_gradient

        if not self.rows_known:
            self._forward_product(torch.zeros_like(states))
        return run_value_gradient(self.spec, states, *self.states, self.strength, self.saved)


def can_fuse(query: Tensor, key: Tensor, refinement: Refinement, mask: Mask, scale: float) -> bool:
    """Whether the kernels support these heads, ``[heads, tokens, dim]`` each."""
    return (
        query.is_cuda
        and mask.is_plain
        and refinement.factor in POTTS
        and refinement.message_stride == 1
        and fused_obstacle(
            Call.of(query[None], key[None], query[None], refinement, is_causal=mask.causal, scale=scale)
        )
        is None
    )


def operator_for(
    query: Tensor, key: Tensor, refinement: Refinement, strength: Tensor, mask: Mask, *, scale: float
) -> AttentionOperator:
    """Products with the maps of some heads of one text: query and key ``[heads, tokens, dim]``."""
    if refinement.is_plain and mask.is_plain:
        return PlainOperator(query, key, causal=mask.causal, scale=scale)
    if refinement.factor == "elemmul" and mask.is_plain and not mask.causal and refinement.steps == 1:
        return SimilarityOperator(PlainOperator(query, key, causal=False, scale=scale))
    if can_fuse(query, key, refinement, mask, scale):
        return FusedOperator(query, key, refinement, strength, scale=scale)
    return TiledOperator(query, key, refinement, strength, mask, scale=scale)

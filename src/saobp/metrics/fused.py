"""Refined attention as an operator, by the fused kernels: A^T X is the gradient that their values receive."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from saobp.kernels.fused import POTTS, unsupported
from saobp.metrics.tiles import Mask, TiledOperator
from saobp.refinement import Refinement


class FusedOperator:
    """Products with refined maps where the kernels support them.

    One forward call yields what the backward kernels need, and the summed messages from which single rows
    follow; neither depends on the values.
    """

    causal = False

    def __init__(
        self, query: Tensor, key: Tensor, refinement: Refinement, strength: Tensor, *, scale: float
    ) -> None:
        """query and key ``[heads, tokens, dim]``; strength ``[heads]``."""
        sign, hears = POTTS[refinement.factor]
        self.query, self.key = query.contiguous()[None], key.contiguous()[None]
        self.strength = strength.float()
        self.numbers: tuple[Any, ...] = (query.shape[1], scale, 0.0, sign, hears, 0.0)
        self.width = query.shape[-1]
        self.saved = self._forward(torch.zeros_like(self.query))
        heard = self.saved[2] * math.log(2) if hears else None  # kernels count in powers of two
        self.single_rows = TiledOperator(query, key, refinement, strength, Mask(), scale=scale, heard=heard)

    def rows(self, places: Tensor) -> Tensor:
        return self.single_rows.rows(places)

    def sweep(self, forward: Tensor | None, backward: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        output = None if forward is None else self._by_width(forward, lambda part: self._forward(part)[0])
        return output, None if backward is None else self._by_width(backward, self._backward)

    def _by_width(self, states: Tensor, product: Any) -> Tensor:
        """The kernels take values as wide as keys: pad, and go in pieces."""
        parts = []
        for part in states.split(self.width, -1):
            padded = functional.pad(part, (0, self.width - part.shape[-1]))[None].contiguous()
            parts.append(product(padded)[0, ..., : part.shape[-1]])
        return torch.cat(parts, -1)

    def _forward(self, values: Tensor) -> tuple[Tensor, ...]:
        from saobp.kernels.operator import refined_attention

        return refined_attention(self.query, self.key, values, self.strength, None, None, None, *self.numbers)

    def _backward(self, states: Tensor) -> Tensor:
        from saobp.kernels.operator import refined_attention_backward

        values = torch.zeros_like(self.query)
        _, _, gathered, _ = refined_attention_backward(
            states, self.query, self.key, values, self.strength, None, None, None, *self.saved, *self.numbers
        )
        return gathered


def can_fuse(query: Tensor, key: Tensor, refinement: Refinement, mask: Mask, scale: float) -> bool:
    """Whether the kernels support these heads, ``[heads, tokens, dim]`` each."""
    return (
        query.is_cuda
        and mask.is_plain
        and refinement.factor in POTTS
        and unsupported(query[None], key[None], query[None], refinement, mask.causal, scale, 0.0) is None
    )

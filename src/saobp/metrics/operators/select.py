"""Which operator computes products with the maps of a call."""

from __future__ import annotations

from torch import Tensor

from saobp.metrics.operators.fused import FusedOperator, can_fuse
from saobp.metrics.operators.plain import AttentionOperator, PlainOperator, SimilarityOperator
from saobp.metrics.operators.tiled import Mask, TiledOperator
from saobp.refinement import Refinement


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

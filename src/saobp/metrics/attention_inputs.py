"""Inputs of attention: queries, keys, masks and the refinement of some heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saobp.functional import build_graph
from saobp.metrics.functional.maps import Maps, unchecked_maps
from saobp.metrics.operators.tiled import Mask
from saobp.propagation.beliefs import propagate
from saobp.propagation.factors import get_factor
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import head_strength
from saobp.refinement import Refinement


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys, mask and refinement of some heads, from which their attention maps follow.

    query ``[batch, heads, length, dim]``, key ``[batch, heads or fewer, length, dim]``, strength ``[heads]``
    or as in ``head_strength``, padding_mask ``[batch, length]``, True for real tokens. ``window`` is that of
    sliding-window attention.
    For masks of other shapes, visible (bool) and bias (added to scores) are
    ``[batch or 1, heads or 1, length, length]``; ``causal_messages`` then says whether rows receive the
    messages of earlier rows alone.
    """

    query: Tensor
    key: Tensor
    strength: Tensor
    refinement: Refinement
    causal: bool
    scale: float
    padding_mask: Tensor | None = None
    window: int | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    causal_messages: bool | None = None

    def has_causal_messages(self) -> bool:
        """Whether rows receive messages of earlier rows alone; by default as the attention is causal."""
        return self.refinement.future == "strict" and (
            self.causal if self.causal_messages is None else self.causal_messages
        )

    def select(self, items: slice, heads: slice) -> AttentionInputs:
        """The given texts and heads, with shared keys repeated for their query heads."""
        groups = self.query.shape[1] // self.key.shape[1]
        positions = torch.arange(heads.start, heads.stop, device=self.key.device) // groups
        return replace(
            self,
            query=self.query[items, heads],
            key=self.key[items][:, positions] if groups > 1 else self.key[items, heads],
            strength=_strength_slice(self.strength, items, heads),
            padding_mask=None if self.padding_mask is None else self.padding_mask[items],
            visible=_mask_slice(self.visible, items, heads),
            bias=_mask_slice(self.bias, items, heads),
        )

    def without_empty_texts(self) -> AttentionInputs:
        """Without texts that are all padding, as in a padded last batch."""
        if self.padding_mask is None:
            return self
        kept = self.padding_mask.any(-1).nonzero()[:, 0]
        if len(kept) == len(self.padding_mask):
            return self
        return replace(
            self,
            query=self.query[kept],
            key=self.key[kept],
            strength=_strength_slice(self.strength, kept, slice(None)),
            padding_mask=self.padding_mask[kept],
            visible=self.visible if self.visible is None or len(self.visible) == 1 else self.visible[kept],
            bias=self.bias if self.bias is None or len(self.bias) == 1 else self.bias[kept],
        )

    def unpadded_text(self, item: int) -> AttentionInputs:
        """One text without its padding; grouped keys stay grouped."""
        items, heads = slice(item, item + 1), slice(0, self.query.shape[1])
        one = replace(
            self,
            query=self.query[items],
            key=self.key[items],
            strength=_strength_slice(self.strength, items, heads),
            visible=_mask_slice(self.visible, items, heads),
            bias=_mask_slice(self.bias, items, heads),
        )
        if self.padding_mask is None:
            return one
        real = self.padding_mask[item].nonzero()[:, 0]
        return replace(
            one,
            query=one.query[:, :, real],
            key=one.key[:, :, real],
            strength=_strength_between(one.strength, real),
            padding_mask=None,
            visible=None if one.visible is None else one.visible[..., real, :][..., real],
            bias=None if one.bias is None else one.bias[..., real, :][..., real],
        )

    def mask(self) -> Mask:
        """The mask of a single text."""
        visible = None if self.visible is None else self.visible[0]
        bias = None if self.bias is None else self.bias[0]
        return Mask(self.causal, self.window, visible, bias, self.has_causal_messages())

    def scores(self) -> tuple[Tensor, FactorGraph]:
        """Scores before any refinement, ``[batch, heads, length, length]``, and the factor graph."""
        precision = torch.promote_types(self.query.dtype, torch.float32)
        scores = self.query.to(precision) @ self.key.to(precision).transpose(-1, -2) * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        length = scores.shape[-1]
        graph = build_graph(length, length, self.refinement, self.padding_mask, self.causal, scores.device)
        graph = replace(graph, causal=self.has_causal_messages())
        for seen in (self.visible, self._within_window(length)):
            if seen is not None:
                graph = replace(graph, visible=seen if graph.visible is None else seen & graph.visible)
        return scores, graph

    def maps(self) -> Maps:
        """Refined attention maps, ``[batch, heads, length, length]``."""
        scores, graph = self.scores()
        if self.refinement.factor == "none":
            return unchecked_maps(graph.mask_rows(graph.mask_scores(scores).softmax(-1)), self.padding_mask)
        rows = propagate(
            scores,
            get_factor(self.refinement.factor),
            head_strength(self.strength, scores),
            graph,
            steps=self.refinement.steps,
            damping=self.refinement.damping,
            message_stride=self.refinement.message_stride,
        ).rows
        return unchecked_maps(rows, self.padding_mask)

    def _within_window(self, length: int) -> Tensor | None:
        if self.window is None:
            return None
        positions = torch.arange(length, device=self.query.device)
        return (positions[:, None] - positions).abs() < self.window


def _strength_slice(strength: Tensor, items: slice | Tensor, heads: slice) -> Tensor:
    """Strengths of the given texts and heads."""
    if strength.ndim == 1:
        return strength[heads]
    return (strength[:, items] if strength.shape[1] > 1 else strength)[:, :, heads]


def _strength_between(strength: Tensor, real: Tensor) -> Tensor:
    """Strengths between the given tokens alone."""
    if strength.ndim > 1 and strength.shape[-2] > 1:
        strength = strength[..., real, :]
    if strength.ndim > 1 and strength.shape[-1] > 1:
        strength = strength[..., real]
    return strength


def _mask_slice(mask: Tensor | None, items: slice, heads: slice) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[items] if mask.shape[0] > 1 else mask
    return mask[:, heads] if mask.shape[1] > 1 else mask

"""Inputs of attention: queries, keys, masks and the refinement of some heads, as captured from a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from saobp.functional import build_graph
from saobp.metrics.functional.maps import Maps, unchecked_maps
from saobp.metrics.operators.tiled import Mask, capped
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import head_strength, refine_scores
from saobp.refinement import Refinement
from saobp.transformers.attention_function import unknown_argument
from saobp.transformers.capture import AttentionCall

ROWS_AT_ONCE = 1024
PLAIN = Refinement("none")


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys, mask and refinement of some heads, from which their attention maps follow.

    query ``[batch, heads, length, dim]``, key ``[batch, heads or fewer, length, dim]``, strength ``[heads]``
    or as in ``head_strength``, padding_mask ``[batch, length]``, True for real tokens. ``window`` is that of
    sliding-window attention.
    For masks of other shapes, visible (bool) and bias (added to scores) are
    ``[batch or 1, heads or 1, length, length]``; ``causal_messages`` then says whether rows receive the
    messages of earlier rows alone. ``softcap`` c bounds scores, as c tanh(score / c), before any bias.
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
    softcap: float | None = None

    def has_causal_messages(self) -> bool:
        """Whether rows receive messages of earlier rows alone; by default as the attention is causal."""
        return self.refinement.future == "strict" and (
            self.causal if self.causal_messages is None else self.causal_messages
        )

    def texts(self, items: slice | Tensor) -> AttentionInputs:
        """The given texts, with all heads."""
        return replace(
            self,
            query=self.query[items],
            key=self.key[items],
            strength=self.strength if self.strength.ndim == 1 else _part(self.strength, 1, items),
            padding_mask=None if self.padding_mask is None else self.padding_mask[items],
            visible=_part(self.visible, 0, items),
            bias=_part(self.bias, 0, items),
        )

    def select(self, items: slice, heads: slice) -> AttentionInputs:
        """The given texts and heads, with shared keys repeated for their query heads."""
        inputs = self.texts(items)
        groups = self.query.shape[1] // self.key.shape[1]
        positions = torch.arange(heads.start, heads.stop, device=self.key.device) // groups
        return replace(
            inputs,
            query=inputs.query[:, heads],
            key=inputs.key[:, positions] if groups > 1 else inputs.key[:, heads],
            strength=inputs.strength[heads] if inputs.strength.ndim == 1 else inputs.strength[:, :, heads],
            visible=_part(inputs.visible, 1, heads),
            bias=_part(inputs.bias, 1, heads),
        )

    def without_empty_texts(self) -> AttentionInputs:
        """Without texts that are all padding, as in a padded last batch."""
        if self.padding_mask is None:
            return self
        nonempty = self.padding_mask.any(-1).nonzero()[:, 0]
        return self if len(nonempty) == len(self.padding_mask) else self.texts(nonempty)

    def unpadded_text(self, item: int) -> AttentionInputs:
        """One text without its padding; grouped keys stay grouped."""
        inputs = self.texts(slice(item, item + 1))
        if self.padding_mask is None:
            return inputs
        real = self.padding_mask[item].nonzero()[:, 0]
        strength = inputs.strength
        return replace(
            inputs,
            query=inputs.query[:, :, real],
            key=inputs.key[:, :, real],
            strength=strength if strength.ndim == 1 else _part(_part(strength, 3, real), 4, real),
            padding_mask=None,
            visible=_part(_part(inputs.visible, 2, real), 3, real),
            bias=_part(_part(inputs.bias, 2, real), 3, real),
        )

    def mask(self) -> Mask:
        """The mask of a single text."""
        visible = None if self.visible is None else self.visible[0]
        bias = None if self.bias is None else self.bias[0]
        return Mask(self.causal, self.window, visible, bias, self.has_causal_messages(), self.softcap)

    def even(self) -> AttentionInputs:
        """Those of the uniform maps under the same mask, for one head."""
        nothing = self.query.new_zeros(len(self.query), 1, self.query.shape[-2], 1)
        return AttentionInputs(
            nothing,
            nothing,
            nothing.new_zeros(1),
            PLAIN,
            self.causal,
            1.0,
            self.padding_mask,
            self.window,
            None if self.visible is None else self.visible[:, :1],
        )

    def scores(self) -> tuple[Tensor, FactorGraph]:
        """Scores before any refinement, ``[batch, heads, length, length]``, and the factor graph."""
        precision = torch.promote_types(self.query.dtype, torch.float32)
        scores = (self.query.to(precision) @ self.key.to(precision).transpose(-1, -2)).mul_(self.scale)
        scores = capped(scores, self.softcap)
        if self.bias is not None:
            scores = scores + self.bias
        length = scores.shape[-1]
        graph = build_graph(
            length, length, self.refinement, self.padding_mask, self.causal, scores.device, window=self.window
        )
        graph = replace(graph, causal=self.has_causal_messages())
        if self.visible is not None:
            visible = self.visible if graph.visible is None else self.visible & graph.visible
            graph = replace(graph, visible=visible)
        return scores, graph

    def maps(self) -> Maps:
        """Refined attention maps, ``[batch, heads, length, length]``."""
        scores, graph = self.scores()
        if self.refinement.factor == "none":
            return unchecked_maps(graph.mask_rows(graph.mask_scores(scores).softmax(-1)), self.padding_mask)
        beliefs = refine_scores(scores, self.refinement, head_strength(self.strength, scores), graph)
        return unchecked_maps(beliefs.rows, self.padding_mask)


def _part(values: Tensor | None, dimension: int, chosen: slice | Tensor) -> Any:
    """Some entries along a dimension, unless it has one entry for all."""
    if values is None or values.shape[dimension] == 1:
        return values
    return values[(*[slice(None)] * dimension, chosen)]


def inputs_of(
    call: AttentionCall, texts: int | None = None, *, linear: bool = False
) -> AttentionInputs | None:
    """Inputs of one call for its first ``texts`` texts; None for cross-attention and cached decoding.

    ``linear`` detects a causal or full mask in a 4-D one, so that the sampled method can use fused kernels.
    """
    length = call.query.shape[-2]
    if length != call.key.shape[-2] or is_cross_attention(call):
        return None
    check_options(call, "softcap")
    softcap = call.options.get("softcap")
    refinement, strength = call.refinement()
    query, key = call.query.detach()[:texts], call.key.detach()[:texts]
    if strength.ndim > 1 and strength.shape[1] > 1:
        strength = strength[:, :texts]
    mask = call.mask
    heads = AttentionInputs(
        query, key, strength.detach(), refinement, causal=False, scale=call.scaling, softcap=softcap
    )
    padding: Tensor | None = None
    if call.sequences is None and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
        padding = None if mask is None else mask[:texts, -length:].bool()
        applies = mask is not None or call.implementation != "eager"
        return replace(heads, causal=call.is_causal and applies, padding_mask=padding, window=call.window)
    graph, bias = call.graph()
    assert graph.visible is not None
    visible = graph.visible[:texts].expand(-1, -1, length, length)
    real = visible.any(-1) if graph.senders is None else visible.any(-1) & graph.senders[:texts, ..., 0]
    bias = None if bias is None or not bool(bias.any()) else bias[:texts].expand(-1, -1, length, length)
    if not bool(real.all()):
        padding = real.any(1).expand(len(query), -1)
    kind = _mask_kind(visible, padding) if linear and bias is None else None
    return replace(
        heads,
        causal=kind == "causal",
        padding_mask=padding,
        visible=visible if kind is None else None,
        bias=bias,
        causal_messages=call.is_causal,
    )


def _mask_kind(visible: Tensor, padding: Tensor | None) -> str | None:
    """``causal`` or ``full`` if the mask equals that, up to padding, in all real rows."""
    length = visible.shape[-1]
    keys = torch.arange(length, device=visible.device)
    fits = {"full": True, "causal": True}
    for positions in keys.split(ROWS_AT_ONCE):
        seen = visible[:, :, positions]
        for kind in fits:
            expected = (keys <= positions[:, None])[None, None] if kind == "causal" else torch.ones_like(seen)
            if padding is not None:
                expected = expected & padding[:, None, None, :]
            differs = seen != expected
            if padding is not None:
                differs = differs & padding[:, None, positions, None]
            fits[kind] = fits[kind] and not bool(differs.any())
    return next((kind for kind, fit in fits.items() if fit), None)


def is_cross_attention(call: AttentionCall) -> bool:
    """Whether keys come from another sequence; equal lengths do not rule that out."""
    module_name = call.name.rpartition(".")[2].lower()
    has_cross_name = any(word in module_name for word in ("cross", "encoder_attn", "encdecattention"))
    return (
        has_cross_name
        or ".crossattention" in call.name
        or bool(getattr(call.module, "is_cross_attention", False))
    )


def check_options(call: AttentionCall, *known: str) -> None:
    """Raises for options that change the rows, except for those known.

    A sink is no token: statistics are those of the rows without its part, whose share goes to the tokens.
    """
    name = unknown_argument(
        {name: value for name, value in call.options.items() if name not in (*known, "s_aux")}
    )
    if name is not None:
        raise ValueError(
            f"{type(call.module).__name__} passes {name!r} to its attention, which changes the rows in a way "
            "that saobp's statistics do not know"
        )

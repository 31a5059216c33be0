"""What computes a refined call of a model: the public operation, fused kernels, or the reference."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from saobp.kernels.calls import Path
from saobp.refinement import Refinement
from saobp.transformers.cache import MessageCacheLayer
from saobp.transformers.cached_attention import fused_step_obstacle
from saobp.transformers.masked_call import masked_path
from saobp.transformers.packed_sequences import are_sequences
from saobp.variants import PlusOne


class RefinedCall(NamedTuple):
    """What the attention function of a model gets, with the refinement of the layer.

    query:    ``[batch, heads, queries, dim]``; key and value ``[batch, key heads, keys, dim]``
    strength: as :meth:`LayerRefinement.strengths` gives it
    mask:     as ``masks.saobp_mask`` makes it, or a user's 4-D mask
    window:   sliding window of the layer
    messages: the cache layer of a causal call with a key-value cache
    sink:     the variant that replaces softmax, if there is one
    """

    query: Tensor
    key: Tensor
    value: Tensor
    refinement: Refinement
    strength: Tensor
    mask: Tensor | None
    window: int | None
    messages: MessageCacheLayer | None
    sink: PlusOne | None
    is_causal: bool
    wants_rows: bool
    dropout_p: float
    scale: float | None


class Route(NamedTuple):
    """What computes a call.

    name:   ``attention``: :func:`saobp.attention`, also within packed sequences; ``masked``: the kernels for
            masks; ``step``: those of a decoding step; ``reference``: with the whole map in memory
    reason: why ``reference``
    path:   of ``masked``
    """

    name: Literal["attention", "masked", "step", "reference"]
    reason: str | None = None
    path: Path | None = None


def select_route(call: RefinedCall) -> Route:
    query, key, value, refinement, strength, mask, window, messages, sink = call[:9]
    queries, keys = query.shape[-2], key.shape[-2]
    obstacle = None
    if call.wants_rows:
        obstacle = "the attention rows were asked for"
    elif sink is not None:
        obstacle = f"{type(sink).__name__} changes the softmax"
    elif strength.ndim > 1 and strength[0].numel() > strength.shape[2]:
        obstacle = "its strengths are not one per head and step"
    elif queries != keys or (messages is not None and messages.past is not None):
        obstacle = f"{queries} queries see {keys} keys, earlier ones from a cache"
    mask_obstacle = attention_mask_obstacle(mask, keys, window)
    if obstacle is None and mask_obstacle is None:
        return Route("attention")
    if obstacle is None and not call.is_causal:
        path = masked_path(
            (query, key, value), refinement, strength, mask, window,
            dropout_p=call.dropout_p, scale=call.scale,
        )  # fmt: skip
        if path.name == "fused":
            return Route("masked", path=path)
    if messages is not None and sink is None and not call.wants_rows:
        step = query, key, value, refinement, strength, mask, messages, call.dropout_p
        if fused_step_obstacle(*step) is None:
            return Route("step")
    return Route("reference", obstacle or mask_obstacle)


def attention_mask_obstacle(mask: Tensor | None, keys: int, window: int | None) -> str | None:
    """Why :func:`saobp.attention` cannot take the mask of a model's call; None if it can."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return "its mask says more than padding or packed sequences"
    if window is not None and window < keys and are_sequences(mask):
        return f"its sliding window of {window} is shorter than the {keys} tokens of packed sequences"
    if mask is not None and are_sequences(mask) and torch.compiler.is_compiling():
        return "a compiled call cannot read where packed sequences begin"
    return None

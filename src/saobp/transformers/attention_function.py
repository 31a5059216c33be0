"""The attention function behind ``attn_implementation="saobp"``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saobp.arguments import NEUTRAL_ARGUMENTS, BoundedStrength, under_autocast
from saobp.functional import attention
from saobp.kernels.calls import Path
from saobp.propagation.factors import Similarity, get_factor, has_strength
from saobp.propagation.reference import reference_attention
from saobp.refinement import Refinement
from saobp.transformers.cache import MessageCacheLayer
from saobp.transformers.cached_attention import Prefill, cached_attention, fused_step, why_not_fused_step
from saobp.transformers.layer_refinement import (
    ATTACHED,
    LayerRefinement,
    is_causal_call,
    own_layer,
    reject_cross_attention,
    variants_of,
)
from saobp.transformers.masked_call import masked_output, masked_path
from saobp.transformers.masks import graph_of
from saobp.transformers.packed_sequences import (
    are_sequences,
    attention_of_sequences,
    sequence_numbers,
    with_sequences,
)
from saobp.transformers.projections import projection_weights
from saobp.variants import PlusOne, States, Variant

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None  # type: ignore[assignment]

KNOWN_ARGUMENTS = NEUTRAL_ARGUMENTS | {
    *("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx"),
}
"""Accepted arguments: those of packed sequences, and others that do not affect attention."""


def saobp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Refined attention for a model: query ``[batch, heads, queries, dim]``, key and value with key heads.

    Returns ``[batch, queries, heads, dim]``, contiguous, and the refined rows if requested.
    """
    reject(module, kwargs)
    query, key, value = under_autocast(query, key, value)
    own, sink = own_layer(module), None
    variants = variants_of(own)
    if variants:
        if module.training and not is_recomputation():
            for variant in variants:
                variant.update(partial(projection_weights, module))
        query, key, value = varied_states(module, query, key, value)
        sink = sink_of(variants)
    refinement, strength, messages = own_refinement(module, own, query, key.shape[-2])
    if messages is not None and own is not None:
        own.call.messages = None
        if is_causal is None:
            is_causal = True  # the pre-hook gives a cache layer to causal modules only
        if not messages.stale:
            messages = None  # the keys of this call went to another layer of the cache
    causal = is_causal_call(module, is_causal)
    if not causal and is_causal is None:
        _check_not_decoder(module)
    queries, keys = query.shape[-2], key.shape[-2]
    if messages is None:
        _check_lengths(module, own, refinement, queries, keys, causal)
    if not causal:
        messages = None  # its layer stays stale, so the next call raises
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is not None:
        attention_mask = with_sequences(attention_mask, sequence_numbers(lengths, query, keys))
    wants_rows = rows_wanted(kwargs)
    states = query, key, value
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    masked = refinement, strength, attention_mask, sliding_window
    route, _, _ = route_of(states, *masked, messages, sink, causal=causal, wants_rows=wants_rows, **options)
    rows = None
    if route == "attention":
        if messages is not None:
            messages.defer(Prefill(query, key, refinement, strength, attention_mask, scaling, sliding_window))
            if torch.compiler.is_exporting():
                messages.flush()
        options |= {"is_causal": causal, "strength": BoundedStrength(strength, refinement.strongest)}
        if attention_mask is not None and are_sequences(attention_mask):
            longest = kwargs.get("max_length_q")
            output = attention_of_sequences(*states, refinement, attention_mask, lengths, longest, options)
        else:
            options["sliding_window"] = sliding_window
            output = attention(*states, refinement, attention_mask=attention_mask, **options)
    elif route == "masked":
        output = masked_output(states, *masked, **options)
    elif route == "step":
        assert attention_mask is not None
        assert messages is not None
        output = fused_step(*states, refinement, strength, attention_mask, messages, scaling)
    else:
        graph, bias = graph_of(attention_mask, query, keys, refinement, causal, sliding_window)
        if sink is not None:
            output, rows = sink.attend(*states, graph, bias=bias, **options)
        else:
            call = *states, refinement, strength, graph
            if messages is None:
                output, rows, _ = reference_attention(*call, bias=bias, **options)
            else:
                output, rows = cached_attention(*call, messages, bias=bias, wants_rows=wants_rows, **options)
    if variants and own is not None:
        for variant in variants:
            output = variant.output(output, own.call.inputs)
        own.call.inputs = None
    return output.transpose(1, 2).contiguous(), rows if wants_rows else None


def is_recomputation() -> bool:
    """Whether gradient checkpointing runs a forward pass again, inside the backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def varied_states(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> States:
    """Query, key and value as variants of the module's attention change them."""
    for variant in variants_of(own_layer(module)):
        query, key, value = variant.states(query, key, value, partial(projection_weights, module))
    return query, key, value


def sink_of(variants: list[Variant]) -> PlusOne | None:
    return next((variant for variant in variants if isinstance(variant, PlusOne)), None)


def route_of(
    states: States,
    refinement: Refinement,
    strength: Tensor,
    mask: Tensor | None,
    window: int | None,
    messages: MessageCacheLayer | None,
    sink: PlusOne | None,
    *,
    causal: bool,
    wants_rows: bool,
    dropout_p: float,
    scale: float | None,
) -> tuple[str, str | None, Path | None]:
    """What computes a call, why it is the whole map if it is, and the path of kernels for masks.

    ``attention``: :func:`saobp.attention`, also within packed sequences; ``masked``: the kernels for masks;
    ``step``: those of a decoding step; ``map``: plain PyTorch with the whole map in memory.
    """
    queries, keys = states[0].shape[-2], states[1].shape[-2]
    why = None
    if wants_rows:
        why = "the attention rows were asked for"
    elif sink is not None:
        why = f"{type(sink).__name__} changes the softmax"
    elif strength.ndim > 1 and strength[0].numel() > strength.shape[2]:
        why = "its strengths are not one per head and step"
    elif queries != keys or (messages is not None and messages.past is not None):
        why = f"{queries} queries see {keys} keys, earlier ones from a cache"
    mask_why = why_mask_needs_map(mask, keys, window)
    if why is None and mask_why is None:
        return "attention", None, None
    if why is None and not causal:
        path = masked_path(states, refinement, strength, mask, window, dropout_p=dropout_p, scale=scale)
        if path.name == "fused":
            return "masked", None, path
    may_step = messages is not None and sink is None and not wants_rows
    if may_step and why_not_fused_step(*states, refinement, strength, mask, messages, dropout_p) is None:
        return "step", None, None
    return "map", why or mask_why, None


def why_mask_needs_map(mask: Tensor | None, keys: int, window: int | None) -> str | None:
    """Why the mask of a call does not go by :func:`saobp.attention`; None if it does."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return "its mask says more than padding or packed sequences"
    if window is not None and window < keys and are_sequences(mask):
        return f"its sliding window of {window} is shorter than the {keys} tokens of packed sequences"
    if mask is not None and are_sequences(mask) and torch.compiler.is_compiling():
        return "a compiled call cannot read where packed sequences begin"
    return None


def rows_wanted(kwargs: dict[str, Any]) -> bool:
    """Whether the caller asked for attention rows, by argument or through Transformers' output capturing.

    Models such as GPT-2 do not pass ``output_attentions`` on to the attention function.
    """
    if kwargs.get("output_attentions"):
        return True
    if _active_collector is None or torch.compiler.is_compiling():
        return False
    collected = _active_collector.get()
    return collected is not None and "attentions" in collected


def own_refinement(
    module: nn.Module, own: LayerRefinement | None, query: Tensor, keys: int
) -> tuple[Refinement, Tensor, MessageCacheLayer | None]:
    """The module's refinement, strengths of this call and the cache layer set by its pre-hook."""
    if own is None:
        reject_cross_attention(module)
    else:
        if own.heads != query.shape[1]:
            name = type(module).__name__
            raise ValueError(f"{name} was expected to have {own.heads} heads but has {query.shape[1]}")
        return own.of_rows, own.strengths((query.shape[-2], keys)), own.call.messages
    written = getattr(getattr(module, "config", None), ATTACHED, None)
    if written is None:
        raise ValueError(
            "attn_implementation='saobp' says nothing about how to refine: call "
            "saobp.apply(model, refinement), or saobp.load(path, AutoClass) for a saved model"
        )
    refinement = Refinement.from_dict(written)
    weighted = has_strength(refinement.factor)
    if refinement.variants or (weighted and not isinstance(refinement.strength, float)):
        what = (
            f"variants {refinement.variants}" if refinement.variants else f"strength {refinement.strength!r}"
        )
        raise ValueError(
            f"{what} in config.saobp needs a value for each layer: use "
            "saobp.load(path, AutoClass), or saobp.apply(model, refinement)"
        )
    strength = refinement.strength if weighted else 0.0
    return refinement, torch.full((query.shape[1],), strength, device=query.device), None  # type: ignore[arg-type]


def reject(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raises on arguments that change attention in unsupported ways."""
    name = unknown_argument(kwargs)
    if name is not None:
        raise ValueError(
            f"{type(module).__name__} passes {name!r}, which refined attention cannot honour: leave it out, "
            "or use another attention implementation"
        )


def unknown_argument(kwargs: dict[str, Any]) -> str | None:
    """The first argument that is set and may change attention in a way not known here."""
    given = (name for name, value in kwargs.items() if value is not None and value is not False)
    return next((name for name in given if name not in KNOWN_ARGUMENTS), None)


def _check_not_decoder(module: nn.Module) -> None:
    """Raises for a decoder's attention that says it is not causal (BigBirdPegasus).

    Its masks hide later keys, but a causal mask without padding may be left out, as for PyTorch's attention.
    """
    config = getattr(module, "config", None)
    if getattr(module, "is_decoder", False) and getattr(config, "is_causal", None) is not False:
        raise ValueError(
            f"{type(module).__name__} belongs to a decoder and says that it is not causal (is_causal), so "
            "saobp cannot tell whether rows may see later keys"
        )


def _check_lengths(
    module: nn.Module,
    own: LayerRefinement | None,
    refinement: Refinement,
    queries: int,
    keys: int,
    causal: bool,
) -> None:
    """Raises for rows that need messages of earlier rows, which a call without a cache layer lacks."""
    factor = get_factor(refinement.factor)
    if queries == keys or factor is None or not factor.remembers:
        return
    if not causal or isinstance(factor, Similarity):
        raise ValueError(
            f"{refinement.factor!r} with {queries} queries and {keys} keys has no meaning: saobp refines "
            "self-attention over one whole sequence, not cross-attention"
        )
    lacks = f"{queries} queries and {keys} keys lack the messages of the earlier rows: "
    if own is not None:
        raise ValueError(
            f"{lacks}{type(module).__name__} keeps no keys of its own in the cache, or attends to them more "
            "than once in a forward pass, so generate with use_cache=False"
        )
    raise ValueError(
        f"{lacks}decode with a model from saobp.load(path, AutoClass) or saobp.apply(model, refinement), "
        "whose cache carries them, or generate with use_cache=False"
    )

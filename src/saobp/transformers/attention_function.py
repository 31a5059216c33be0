"""The attention function behind ``attn_implementation="saobp"``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saobp.arguments import NEUTRAL_ARGUMENTS, BoundedStrength, check_not_decoder, under_autocast
from saobp.functional import attention
from saobp.propagation.factors import Similarity, get_factor, has_strength
from saobp.propagation.reference import reference_attention
from saobp.refinement import Refinement
from saobp.transformers.cache import MessageCacheLayer
from saobp.transformers.cached_attention import Prefill, cached_attention, fused_step
from saobp.transformers.layer_refinement import (
    CONFIG_FIELD,
    LayerRefinement,
    get_layer_refinement,
    is_causal_call,
    reject_cross_attention,
    variants_of,
)
from saobp.transformers.masked_call import masked_output
from saobp.transformers.masks import graph_of
from saobp.transformers.packed_sequences import (
    are_sequences,
    attention_of_sequences,
    sequence_numbers,
    with_sequences,
)
from saobp.transformers.position_bias import biased_mask
from saobp.transformers.projections import projection_weights
from saobp.transformers.routes import RefinedCall, Route, select_route
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
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Refined attention for a model: query ``[batch, heads, queries, dim]``, key and value with key heads.

    position_bias ``[1 or batch, heads, queries, keys]`` is added to the scores, as in T5's encoder. Returns
    ``[batch, queries, heads, dim]``, contiguous, and the refined rows if requested.
    """
    reject(module, kwargs)
    query, key, value = under_autocast(query, key, value)
    layer_refinement = get_layer_refinement(module)
    variants = variants_of(layer_refinement)
    if variants:
        if module.training and not is_recomputation():
            for variant in variants:
                variant.update(partial(projection_weights, module))
        query, key, value = apply_variants(module, query, key, value)
    queries, keys = query.shape[-2], key.shape[-2]
    refinement, strength, messages = resolve_refinement(module, layer_refinement, query, keys)
    if messages is not None and layer_refinement is not None:
        layer_refinement.call.messages = None
        if is_causal is None:
            is_causal = True  # the pre-hook gives a cache layer to causal modules only
        if not messages.stale:
            messages = None  # the keys of this call went to another layer of the cache
    causal = is_causal_call(module, is_causal)
    if not causal and is_causal is None:
        check_not_decoder(module)
    if causal:
        reject(module, {"position_bias": position_bias})
    attention_mask = biased_mask(attention_mask, position_bias)
    if messages is None:
        _check_lengths(module, layer_refinement, refinement, queries, keys, causal)
    if not causal:
        messages = None  # its layer stays stale, so the next call raises
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is not None:
        attention_mask = with_sequences(attention_mask, sequence_numbers(lengths, query, keys))
    call = RefinedCall(
        query, key, value, refinement, strength, attention_mask, sliding_window, messages,
        sink_of(variants), causal, rows_wanted(kwargs), dropout, scaling,
    )  # fmt: skip
    output, rows = _compute(call, select_route(call), lengths, kwargs.get("max_length_q"))
    if variants and layer_refinement is not None:
        for variant in variants:
            output = variant.output(output, layer_refinement.call.inputs)
        layer_refinement.call.inputs = None
    return output.transpose(1, 2).contiguous(), rows if call.wants_rows else None


def _compute(
    call: RefinedCall, route: Route, lengths: Tensor | None, longest: Any
) -> tuple[Tensor, Tensor | None]:
    """Output ``[batch, heads, queries, dim]`` and, by the reference, rows.

    lengths, longest: ``cu_seq_lens_q`` and ``max_length_q`` of packed sequences, if known
    """
    query, key, value, refinement, strength, mask, window, messages, sink = call[:9]
    states = query, key, value
    options: dict[str, Any] = {"dropout_p": call.dropout_p, "scale": call.scale}
    if route.name == "attention":
        if messages is not None:
            messages.defer(Prefill(query, key, refinement, strength, mask, call.scale, window))
            if torch.compiler.is_exporting():
                messages.flush()
        options |= {
            "is_causal": call.is_causal, "strength": BoundedStrength(strength, refinement.strongest)
        }  # fmt: skip
        if mask is not None and are_sequences(mask):
            return attention_of_sequences(*states, refinement, mask, lengths, longest, options), None
        return attention(*states, refinement, attention_mask=mask, sliding_window=window, **options), None
    if route.name == "masked":
        return masked_output(states, refinement, strength, mask, window, **options), None
    if route.name == "step":
        assert mask is not None
        assert messages is not None
        return fused_step(*states, refinement, strength, mask, messages, call.scale), None
    graph, bias = graph_of(mask, query, key.shape[-2], refinement, call.is_causal, window)
    if sink is not None:
        return sink.attend(*states, graph, bias=bias, **options)
    if messages is not None:
        return cached_attention(
            *states, refinement, strength, graph, messages,
            bias=bias, wants_rows=call.wants_rows, **options,
        )  # fmt: skip
    output, rows, _ = reference_attention(*states, refinement, strength, graph, bias=bias, **options)
    return output, rows


def is_recomputation() -> bool:
    """Whether gradient checkpointing runs a forward pass again, inside the backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def apply_variants(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> States:
    """Query, key and value as variants of the module's attention change them."""
    for variant in variants_of(get_layer_refinement(module)):
        query, key, value = variant.states(query, key, value, partial(projection_weights, module))
    return query, key, value


def sink_of(variants: list[Variant]) -> PlusOne | None:
    return next((variant for variant in variants if isinstance(variant, PlusOne)), None)


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


def resolve_refinement(
    module: nn.Module, layer_refinement: LayerRefinement | None, query: Tensor, keys: int
) -> tuple[Refinement, Tensor, MessageCacheLayer | None]:
    """The module's refinement, strengths of this call and the cache layer set by its pre-hook."""
    if layer_refinement is not None:
        if layer_refinement.heads != query.shape[1]:
            name, heads = type(module).__name__, layer_refinement.heads
            raise ValueError(f"{name} was expected to have {heads} heads but has {query.shape[1]}")
        strength = layer_refinement.strengths((query.shape[-2], keys))
        return layer_refinement.row_refinement, strength, layer_refinement.call.messages
    reject_cross_attention(module)
    written = getattr(getattr(module, "config", None), CONFIG_FIELD, None)
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
    number = refinement.strength if weighted else 0.0
    return refinement, torch.full((query.shape[1],), number, device=query.device), None  # type: ignore[arg-type]


def reject(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raises on arguments that change attention in unsupported ways."""
    name = unknown_argument(kwargs)
    if name is not None:
        raise ValueError(
            f"{type(module).__name__} passes {name!r}, which refined attention cannot honour: leave it out, "
            "or call saobp.remove(model) if the model itself passes it"
        )


def unknown_argument(kwargs: dict[str, Any]) -> str | None:
    """The first argument that is set and may change attention in a way not known here."""
    given = (name for name, value in kwargs.items() if value is not None and value is not False)
    return next((name for name in given if name not in KNOWN_ARGUMENTS), None)


def _check_lengths(
    module: nn.Module,
    layer_refinement: LayerRefinement | None,
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
    if layer_refinement is not None:
        raise ValueError(
            f"{lacks}{type(module).__name__} keeps no keys of its own in the cache, or attends to them more "
            "than once in a forward pass, so generate with use_cache=False"
        )
    raise ValueError(
        f"{lacks}decode with a model from saobp.load(path, AutoClass) or saobp.apply(model, refinement), "
        "whose cache carries them, or generate with use_cache=False"
    )

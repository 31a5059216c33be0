"""The attention function behind ``attn_implementation="saobp"``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saobp.functional import attention, build_graph
from saobp.propagation.factors import Similarity, get_factor
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import reference_attention
from saobp.refinement import Refinement
from saobp.transformers.cache import Memory
from saobp.transformers.layer_refinement import ATTACHED, LayerRefinement, is_causal_call, variants_of
from saobp.transformers.masks import read_mask, window_view
from saobp.variants import PlusOne

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None  # type: ignore[assignment]

HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)
"""Arguments that models pass on and that change nothing about softmax attention."""


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

    Returns ``[batch, queries, heads, dim]``, contiguous, and the refined rows where they were asked for.
    """
    reject(module, kwargs)
    query, key, value = varied_states(module, *under_autocast(query, key, value))
    states, wants_rows = (query, key, value, attention_mask), rows_wanted(kwargs)
    output, rows = _attend(module, *states, dropout, scaling, is_causal, sliding_window, wants_rows)
    variants = variants_of(module)
    if variants:
        own: LayerRefinement = module.saobp  # type: ignore[assignment]
        for variant in variants:
            output = variant.output(output, own.inputs)
        own.inputs = None
    return output.transpose(1, 2).contiguous(), rows


def varied_states(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value as variants of the module's attention change them."""
    for variant in variants_of(module):
        query, key, value = variant.states(query, key, value)
    return query, key, value


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    sliding_window: int | None,
    wants_rows: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output ``[batch, heads, queries, dim]`` and, if wanted, the rows, by the cheapest way that fits."""
    refinement, strength, memory = own_refinement(module, query)
    if memory is not None:
        module.saobp.memory = None  # type: ignore[union-attr]
    causal = is_causal_call(module, is_causal)
    queries, keys = query.shape[-2], key.shape[-2]
    _check_lengths(refinement, queries, keys, causal, memory)
    if not causal:
        memory = None  # its layer is left waiting and refuses the next call
    padded = attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2)
    windowed = padded and sliding_window is not None and sliding_window < keys
    for variant in variants_of(module):
        if isinstance(variant, PlusOne):
            graph, bias = graph_of(attention_mask, query, keys, refinement, causal, sliding_window)
            done = variant.attend(query, key, value, graph, bias=bias, dropout_p=dropout, scale=scaling)
            return done[0], done[1] if wants_rows else None
    first = memory is None or memory.heard is None
    if padded and queries == keys and not windowed and first and not wants_rows:
        if memory is not None:
            memory.defer(SquarePrompt(query, key, refinement, strength, attention_mask, scaling))
        output = attention(
            query,
            key,
            value,
            refinement,
            padding_mask=attention_mask,
            is_causal=causal,
            dropout_p=dropout,
            scale=scaling,
            strength=strength,
            strongest=refinement.strongest,
        )
        return output, None
    graph, bias = graph_of(attention_mask, query, keys, refinement, causal, sliding_window)
    states = query, key, value, refinement, strength, graph
    if memory is None:
        found = reference_attention(*states, bias=bias, dropout_p=dropout, scale=scaling)
        return found.output, found.rows if wants_rows else None
    return _with_memory(*states, memory, bias=bias, dropout_p=dropout, scale=scaling, wants_rows=wants_rows)


def under_autocast(*states: Tensor) -> tuple[Tensor, ...]:
    """The states in the precision of autocast, which casts for PyTorch's attention but not for this one.

    Rotary positions leave queries and keys in single precision, beside values in half.
    """
    kind = states[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return states
    half = torch.get_autocast_dtype(kind)
    return tuple(state if state.dtype == torch.float64 else state.to(half) for state in states)


def graph_of(
    mask: Tensor | None, query: Tensor, keys: int, refinement: Refinement, causal: bool, window: int | None
) -> tuple[FactorGraph, Tensor | None]:
    """The factor graph of one call under this implementation's masks, and the bias of a mask of numbers."""
    queries = query.shape[-2]
    strict = causal and refinement.future == "strict"
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        if queries != keys:
            raise ValueError(
                f"a {'missing' if mask is None else '2-D'} mask does not say which of {keys} keys the "
                f"{queries} queries see: pass a 4-D mask"
            )
        if window is None or window >= keys:
            return build_graph(queries, keys, refinement, mask, causal, query.device), None
        view = window_view(window, queries, keys, causal, mask, query.device)
    else:
        view = read_mask(mask, queries, keys)
    return FactorGraph(view.visible, view.speaks, causal=strict), view.bias


@dataclass(frozen=True)
class SquarePrompt:
    """A plain causal call on an empty cache: its output needs nothing from the cache, a later call's does."""

    query: Tensor
    key: Tensor
    refinement: Refinement
    strength: Tensor
    padding: Tensor | None
    scaling: float | None

    def send(self, memory: Memory) -> None:
        keys = self.key.shape[-2]
        graph, _ = graph_of(self.padding, self.query, keys, self.refinement, True, None)
        states = self.query, self.key, self.key, self.refinement, self.strength, graph
        _with_memory(*states, memory, scale=self.scaling)


def _with_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    strength: Tensor,
    graph: FactorGraph,
    memory: Memory,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    wants_rows: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A cached call: rows hear what earlier calls left in the memory, and add to it."""
    past, history, outputs, rows = memory.heard, [], [], []
    for start, stop in memory.spans(query.shape[-2]):
        span = FactorGraph(
            _rows(graph.visible, start, stop), _rows(graph.speaks, start, stop), causal=graph.causal
        )
        done = reference_attention(
            query[:, :, start:stop],
            key,
            value,
            refinement,
            strength,
            span,
            bias=_rows(bias, start, stop),
            dropout_p=dropout_p,
            scale=scale,
            past=past,
            keep_messages=True,
        )
        past = done.messages
        assert past is not None
        history.append(past)
        outputs.append(done.output)
        if wants_rows:
            rows.append(done.rows)
    memory.keep(history)
    return torch.cat(outputs, -2), torch.cat(rows, -2) if wants_rows else None


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


def own_refinement(module: nn.Module, query: Tensor) -> tuple[Refinement, Tensor, Memory | None]:
    """The module's refinement, strengths ``[heads]`` and the memory that its hook noted for this call."""
    own = getattr(module, ATTACHED, None)
    if isinstance(own, LayerRefinement):
        if own.heads != query.shape[1]:
            name = type(module).__name__
            raise ValueError(f"{name} was expected to have {own.heads} heads but has {query.shape[1]}")
        return own.of_rows, own.strength, own.memory
    written = getattr(getattr(module, "config", None), ATTACHED, None)
    if written is None:
        raise ValueError(
            "attn_implementation='saobp' says nothing about how to refine: call "
            "saobp.apply(model, refinement), or saobp.load(path, AutoClass) for a saved model"
        )
    refinement = Refinement.from_dict(written)
    if refinement.variants or (not refinement.is_plain and not isinstance(refinement.strength, float)):
        what = (
            f"variants {refinement.variants}" if refinement.variants else f"strength {refinement.strength!r}"
        )
        raise ValueError(
            f"{what} in config.saobp needs a value for each layer: use "
            "saobp.load(path, AutoClass), or saobp.apply(model, refinement)"
        )
    strength = 0.0 if refinement.is_plain else refinement.strength
    return refinement, torch.full((query.shape[1],), strength, device=query.device), None  # type: ignore[arg-type]


def reject(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse an argument that changes attention in a way the refinement knows nothing of."""
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        raise ValueError(
            f"{type(module).__name__} is cross-attention, whose rows and keys are different tokens: "
            "saobp refines self-attention only"
        )
    for name, value in kwargs.items():
        if name in HARMLESS or value is None or value is False:
            continue
        raise ValueError(
            f"{type(module).__name__} passes {name!r}, which refined attention cannot honour: leave it out, "
            "or use another attention implementation"
        )


def _check_lengths(
    refinement: Refinement, queries: int, keys: int, causal: bool, memory: Memory | None
) -> None:
    factor = get_factor(refinement.factor)
    if queries == keys or factor is None or not factor.remembers or memory is not None:
        return
    if causal and not isinstance(factor, Similarity):
        raise ValueError(
            f"{queries} queries and {keys} keys lack the messages of the earlier rows: decode through a "
            "model prepared by saobp.apply and its own cache, or generate with use_cache=False"
        )
    raise ValueError(
        f"{refinement.factor!r} with {queries} queries and {keys} keys has no meaning: saobp refines "
        "self-attention over one whole sequence, not cross-attention"
    )


def _rows(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[-2] == 1 else tensor[..., start:stop, :]

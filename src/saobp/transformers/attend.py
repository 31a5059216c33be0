"""The attention function behind ``attn_implementation="saobp"``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from saobp.attention import attention, build_graph
from saobp.propagation.factors import Similarity, get_factor
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import Attended, reference_attention
from saobp.refinement import Refinement
from saobp.transformers.attached import ATTACHED, LayerRefinement, is_causal_call
from saobp.transformers.cache import Memory
from saobp.transformers.masks import read_mask, window_view

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
    refinement, strength, memory = own_refinement(module, query)
    if memory is not None:
        module.saobp.memory = None  # type: ignore[union-attr]
    causal = is_causal_call(module, is_causal)
    queries, keys = query.shape[-2], key.shape[-2]
    _check_lengths(refinement, queries, keys, causal, memory)
    if memory is not None and memory.heard is None and module.training and torch.is_grad_enabled():
        memory = None  # a cache that training makes and throws away: its layer will refuse to be read
    padded = attention_mask is None or attention_mask.ndim == 2
    windowed = padded and sliding_window is not None and sliding_window < keys
    wants_rows = rows_wanted(kwargs)
    if padded and queries == keys and not windowed and memory is None and not wants_rows:
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
        )
        return output.transpose(1, 2).contiguous(), None
    graph, bias = graph_of(attention_mask, query, keys, refinement, causal, sliding_window)
    options: dict[str, Any] = {"bias": bias, "dropout_p": dropout, "scale": scaling}
    if memory is None:
        done = reference_attention(query, key, value, refinement, strength, graph, **options)
    else:
        done = _with_memory(query, key, value, refinement, strength, graph, memory, wants_rows, **options)
    return done.output.transpose(1, 2).contiguous(), done.rows if wants_rows else None


def graph_of(
    mask: Tensor | None, query: Tensor, keys: int, refinement: Refinement, causal: bool, window: int | None
) -> tuple[FactorGraph, Tensor | None]:
    """The factor graph of one call under this implementation's masks, and the bias of a mask of numbers."""
    queries = query.shape[-2]
    strict = causal and refinement.future == "strict"
    if mask is None or mask.ndim == 2:
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


def _with_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    strength: Tensor,
    graph: FactorGraph,
    memory: Memory,
    wants_rows: bool,
    *,
    bias: Tensor | None,
    **options: Any,
) -> Attended:
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
            past=past,
            keep_messages=True,
            **options,
        )
        past = done.messages
        assert past is not None
        history.append(past)
        outputs.append(done.output)
        if wants_rows:
            rows.append(done.rows)
    memory.keep(history)
    return Attended(torch.cat(outputs, -2), torch.cat(rows, -2) if wants_rows else query, None)


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
        return own.refinement, own.strength, own.memory
    written = getattr(getattr(module, "config", None), ATTACHED, None)
    if written is None:
        raise ValueError(
            "attn_implementation='saobp' says nothing about how to refine: call "
            "saobp.apply(model, refinement), or saobp.load(path, AutoClass) for a saved model"
        )
    refinement = Refinement.from_dict(written)
    if not refinement.is_plain and not isinstance(refinement.strength, float):
        raise ValueError(
            f"strength {refinement.strength!r} in config.saobp needs a value for each layer: use "
            "saobp.load(path, AutoClass), or saobp.apply(model, refinement)"
        )
    strength = 0.0 if refinement.is_plain else refinement.strength
    return refinement, torch.full((query.shape[1],), strength, device=query.device), None  # type: ignore[arg-type]


def reject(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse an argument that changes attention in a way the refinement knows nothing of."""
    if getattr(module, "is_cross_attention", False):
        _refuse_cross(module)
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


def _refuse_cross(module: nn.Module) -> NoReturn:
    raise ValueError(
        f"{type(module).__name__} is cross-attention, whose rows and keys are different tokens: "
        "saobp refines self-attention only"
    )


def _rows(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[-2] == 1 else tensor[..., start:stop, :]

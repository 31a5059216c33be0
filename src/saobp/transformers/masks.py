"""Masks: created for Transformers' mask interface, and read by the attention function.

A plain causal or bidirectional square batch keeps its 2-D padding mask, and packed sequences keep their
sequence numbers, so that no 4-D mask is built for them.
Everything else becomes a 4-D mask that also marks padding query rows, which send no message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from saobp.arguments import check_symmetric_mask, read_window
from saobp.functional import build_graph
from saobp.propagation.graph import FactorGraph, in_window
from saobp.refinement import Refinement
from saobp.transformers.packed_sequences import are_sequences, packed_sequences, same_sequence

PASS_THEIR_WINDOW = {"modernbert": False, "mistral": True}
"""Model types whose local layers pass ``sliding_window``, so masks need not hold it; and whether causally."""
CHANGE_THEIR_MASK = {"doge"}
"""Model types whose attention changes its mask and takes one that is not bool for numbers to add."""
HIDDEN, SEEN, SEEN_BY_PADDING = 0, 1, 2
"""Entries of the int8 mask ``[batch, 1, queries, keys]``."""


def saobp_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask that the model passes to each attention layer.

    Without earlier keys: None or bool ``[batch, keys]`` (True for real tokens) for a plain causal or
    bidirectional batch, and int64 ``[batch, keys]`` (number of each token's sequence) for packed sequences.
    Otherwise ``[batch, 1, queries, keys]``, bool without padding, int8 with.
    """
    may_skip = (mask_function is causal_mask_function and allow_is_causal_skip) or (
        mask_function is bidirectional_mask_function and allow_is_bidirectional_skip
    )
    starts = isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0
    covered = attention_mask is None or attention_mask.shape[-1] == kv_length
    square = starts and covered and q_length == kv_length
    if starts and attention_mask is not None and q_length > kv_length:
        raise ValueError(f"attention_mask has {kv_length} entries for {q_length} tokens: give one for each")
    if square and (may_skip or is_plain_window(allow_is_causal_skip, allow_is_bidirectional_skip, **kwargs)):
        if attention_mask is None or is_tracing(attention_mask) or not bool(attention_mask.all()):
            return attention_mask
        return None
    if square and attention_mask is None and (sequences := packed_sequences(mask_function)) is not None:
        return sequences
    seen: Any = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=kwargs.get("use_vmap", False),
        device=kwargs.get("device", "cpu"),
    )
    if attention_mask is None or model_type(kwargs) in CHANGE_THEIR_MASK:
        return seen
    missing = max(kv_length + kv_offset - attention_mask.shape[-1], 0)
    rows = torch.arange(q_length, device=attention_mask.device) + q_offset
    real = functional.pad(attention_mask, (0, missing)).index_select(1, rows)
    return seen.to(torch.int8) * torch.where(real, SEEN, SEEN_BY_PADDING).to(torch.int8)[:, None, :, None]


def is_plain_window(causal: bool, bidirectional: bool, **kwargs: Any) -> bool:
    """Whether a mask is a window and nothing else, of a model whose layers pass the window themselves.

    causal, bidirectional: whether Transformers allows to leave such masks out. It forbids both where it
    combines the window with another mask function, and the first in every bidirectional mask.
    """
    is_causal = PASS_THEIR_WINDOW.get(model_type(kwargs))
    allowed = causal if is_causal else bidirectional and not causal
    return is_causal is not None and kwargs.get("local_size") is not None and allowed


def model_type(kwargs: dict[str, Any]) -> str:
    """The model type of the config among the arguments of a mask function."""
    return getattr(kwargs.get("config"), "model_type", None) or ""


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
        if are_sequences(mask):
            if refinement.message_stride > 1:
                raise ValueError(
                    "message_stride counts the rows of each sequence, which a map of packed sequences under "
                    "a window or the compiler does not: pass them one by one, or use message_stride=1"
                )
            visible = same_sequence(mask)
            if causal or (window is not None and window < keys):
                visible = visible & in_window(window or keys, queries, keys, causal, query.device)
            return FactorGraph(visible, causal=strict), None
        window = read_window(window, queries, keys)
        return build_graph(queries, keys, refinement, mask, causal, query.device, window=window), None
    if not causal and isinstance(mask, Tensor) and mask.shape[-1] > keys:
        raise ValueError(f"attention_mask has {mask.shape[-1]} entries for {keys} tokens: give one for each")
    graph, bias = read_mask(mask, queries, keys, causal=strict)
    if not causal:
        check_two_way(graph, queries, refinement)
    return graph, bias


def check_two_way(graph: FactorGraph, queries: int, refinement: Refinement) -> None:
    """Raises if a 4-D mask of attention without causality hides one way: a user's, or PaliGemma's own."""
    if graph.visible is not None and graph.visible.shape[-1] == queries:
        check_symmetric_mask(graph, refinement, is_causal=False)


def read_mask(
    mask: Tensor, queries: int, keys: int, *, causal: bool = False
) -> tuple[FactorGraph, Tensor | None]:
    """The factor graph of a 4-D mask, and the bias that a mask of numbers adds to the scores.

    The mask is ours (int8), or the user's (bool, or numbers). In the user's, a key that no row sees is
    padding, and so is its row.
    """
    mask = check_mask(mask, queries, keys)
    if mask.dtype == torch.int8:
        return FactorGraph(mask != HIDDEN, ~(mask == SEEN_BY_PADDING).any(-1, keepdim=True), causal), None
    is_number = mask.is_floating_point()
    seen = mask > torch.finfo(mask.dtype).min / 2 if is_number else mask
    senders = seen.any(-2).unsqueeze(-1) if queries == keys else None
    return FactorGraph(seen, senders, causal), mask.masked_fill(~seen, 0.0) if is_number else None


def check_mask(mask: Tensor, queries: int, keys: int) -> Tensor:
    """A 4-D mask, cut to the keys; raises on what cannot be read as one."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        what = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"saobp reads masks [batch, keys] or [batch, heads, queries, keys], not {what}")
    mask = mask[..., :keys]
    if mask.shape[-1] != keys or mask.shape[-2] not in (1, queries):
        raise ValueError(
            f"a mask of shape {tuple(mask.shape)} does not fit {queries} queries and {keys} keys"
        )
    if mask.dtype not in (torch.int8, torch.bool) and not mask.is_floating_point():
        raise ValueError(f"a 4-D attention mask must be bool or floating point, not {mask.dtype}")
    return mask

"""The query and key weights of an attention module, head by head: read, or scaled in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from saobp.transformers.apply import head_count

SEPARATE = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"), ("q", "k"), ("wq", "wk"))
_VALUES = {"query": "value", "q_proj": "v_proj", "q_lin": "v_lin", "q": "v", "wq": "wv"}
FUSED = ("c_attn", "Wqkv", "qkv_proj", "qkv", "att_proj")
"""One matrix with all queries first, then all keys, then all values."""
INTERLEAVED = ("query_key_value",)
"""One matrix with query, key and value of the first head, then of the second, and so on."""


def projection_weights(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of queries, keys and values, each ``[outputs, width]``, of projections without biases."""
    names = [(query, key, _VALUES[query]) for query, key in SEPARATE] + [(name,) for name in FUSED]
    candidates: list[list[Any]] = [[getattr(module, name, None) for name in group] for group in names]
    layers = [together for together in candidates if all(map(is_linear, together))]
    if not layers or any(layer.bias is not None for layer in layers[0]):
        raise ValueError(
            f"{type(module).__name__} has no query, key and value weights without biases, whose scale could "
            "be changed: sigma-reparam is for models such as ModernBERT and Llama"
        )
    matrices = [weight_rows(layer) for layer in layers[0]]
    if len(matrices) == 1:
        queries = query_key_weights(module)[0].shape[:2].numel()
        others = (len(matrices[0]) - queries) // 2
        matrices = list(matrices[0].split([queries, others, others]))
    return matrices[0], matrices[1], matrices[2]


def query_key_weights(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Weights of queries and of keys, both ``[heads, head dim, width]``; shared key heads are repeated."""
    parts = split_by_head(module, lambda layer: [weight_rows(layer)], is_linear)
    if parts is None:
        known = [f"{query} and {key}" for query, key in SEPARATE] + [*FUSED, *INTERLEAVED]
        raise ValueError(
            f"{type(module).__name__} has no query and key weights under a name that saobp knows "
            f"({', '.join(known)})"
        )
    (query,), (key,) = parts
    return query, key.repeat_interleave(len(query) // len(key), dim=0)


def split_by_head(
    module: nn.Module, rows_of: Callable[[Any], list[Tensor]], is_usable: Callable[[object], bool]
) -> tuple[list[Tensor], list[Tensor]] | None:
    """Parts of the query and key layers by head, as views: ``[heads, dim, ...]``, ``[key heads, dim, ...]``.

    rows_of: the parts of a layer, each ``[outputs, ...]``. None if no layers under known names are usable.
    """
    heads = head_count(module)
    for names in SEPARATE:
        layers = [getattr(module, name, None) for name in names]
        if all(map(is_usable, layers)):
            query, key = map(rows_of, layers)
            dim = len(query[0]) // heads
            return _by_head(query, dim), _by_head(key, dim)
    for name in FUSED:
        if is_usable(layer := getattr(module, name, None)):
            rows = rows_of(layer)
            dim = getattr(module, "head_dim", None) or len(rows[0]) // (3 * heads)
            queries = heads * dim
            keys = queries + (len(rows[0]) - queries) // 2
            return _by_head([part[:queries] for part in rows], dim), _by_head(
                [part[queries:keys] for part in rows], dim
            )
    for name in INTERLEAVED:
        layer = getattr(module, name, None)
        if is_usable(layer) and len(rows_of(layer)[0]) % (3 * heads) == 0:
            parts = [part.unflatten(0, (heads, 3, -1)) for part in rows_of(layer)]
            return [part[:, 0] for part in parts], [part[:, 1] for part in parts]
    return None


def is_linear(layer: object) -> bool:
    return isinstance(layer, nn.Linear | Conv1D)


def weight_rows(layer: Any) -> Tensor:
    """Weights with a row per output ``[outputs, inputs]``; GPT-2's Conv1D stores them transposed."""
    weight: Tensor = layer.weight
    return weight.mT if isinstance(layer, Conv1D) else weight


def _by_head(rows: list[Tensor], dim: int) -> list[Tensor]:
    return [part.unflatten(0, (-1, dim)) for part in rows]


NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm", "q_ln", "k_ln")
"""Names of norms of queries and keys, which undo any scale of the weights before them."""


class HeadParts:
    """Weights and biases of an attention module's queries and keys, head by head, as views.

    query ``[heads, dim, ...]`` and key ``[key heads, dim, ...]`` each; changing them changes the module.
    """

    def __init__(self, module: nn.Module) -> None:
        norms = [name for name in NORMS if isinstance(getattr(module, name, None), nn.Module)]
        if norms:
            raise ValueError(
                f"{type(module).__name__} normalises its queries and keys ({', '.join(norms)}), so their "
                "size does not follow from its weights and cannot be clipped there"
            )
        bases = {base.__name__ for base in type(module).__mro__}
        if "MPNetSelfAttention" in bases or hasattr(module, "relative_attention_num_buckets"):
            raise ValueError(
                f"{type(module).__name__} adds a bias of positions to its logits, which does not follow from "
                "its query and key weights, so they cannot be clipped there"
            )
        parts = split_by_head(module, _detached_rows, _is_plain)
        if parts is None:
            raise ValueError(
                f"{type(module).__name__} has no query and key weights of plain linear layers under a name "
                "that saobp knows, so they cannot be scaled"
            )
        self.query, self.key = parts
        self.heads, self.key_heads = len(self.query[0]), len(self.key[0])

    def scale(self, query: Tensor, key: Tensor) -> None:
        """Multiply by ``query [heads]`` and ``key [key heads]``, in place."""
        with torch.no_grad():
            for parts, factors in ((self.query, query), (self.key, key)):
                for part in parts:
                    part.mul_(factors.to(part.dtype).view(-1, *[1] * (part.ndim - 1)))


def _is_plain(layer: object) -> bool:
    return is_linear(layer) and type(layer.weight) in (nn.Parameter, Tensor)  # type: ignore[attr-defined]


def _detached_rows(layer: Any) -> list[Tensor]:
    """Weights with a row per output, and the bias if there is one, without gradient tracking."""
    return [weight_rows(layer).detach(), *([] if layer.bias is None else [layer.bias.detach()])]

"""The query and key weights of an attention module, head by head."""

from __future__ import annotations

from typing import Any

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
    found: list[list[Any]] = [[getattr(module, name, None) for name in one] for one in names]
    layers = [together for together in found if all(map(_is_linear, together))]
    if not layers or any(layer.bias is not None for layer in layers[0]):
        raise ValueError(
            f"{type(module).__name__} has no query, key and value weights without biases, whose scale could "
            "be changed: sigma-reparam is for models such as ModernBERT and Llama"
        )
    matrices = [_rows(layer) for layer in layers[0]]
    if len(matrices) == 1:
        queries = query_key_weights(module)[0].shape[:2].numel()
        others = (len(matrices[0]) - queries) // 2
        matrices = list(matrices[0].split([queries, others, others]))
    return matrices[0], matrices[1], matrices[2]


def query_key_weights(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Weights of queries and of keys, both ``[heads, head dim, width]``; shared key heads are repeated."""
    heads = head_count(module)
    for query_name, key_name in SEPARATE:
        query, key = getattr(module, query_name, None), getattr(module, key_name, None)
        if _is_linear(query) and _is_linear(key):
            rows = _rows(query)
            per_head = rows.shape[0] // heads
            return _by_head(rows, per_head), _shared(_by_head(_rows(key), per_head), heads)
    for name in FUSED:
        if _is_linear(both := getattr(module, name, None)):
            rows = _rows(both)
            per_head = getattr(module, "head_dim", None) or rows.shape[0] // (3 * heads)
            queries = heads * per_head
            keys = (rows.shape[0] - queries) // 2
            parts = rows.split([queries, keys, keys])
            return _by_head(parts[0], per_head), _shared(_by_head(parts[1], per_head), heads)
    for name in INTERLEAVED:
        if _is_linear(both := getattr(module, name, None)) and _rows(both).shape[0] % (3 * heads) == 0:
            rows = _rows(both)
            parted = rows.view(heads, 3, rows.shape[0] // (3 * heads), rows.shape[1])
            return parted[:, 0], parted[:, 1]
    known = [f"{query} and {key}" for query, key in SEPARATE] + [*FUSED, *INTERLEAVED]
    raise ValueError(
        f"{type(module).__name__} has no query and key weights under a name that saobp knows "
        f"({', '.join(known)})"
    )


def _is_linear(layer: object) -> bool:
    return isinstance(layer, nn.Linear | Conv1D)


def _rows(layer: nn.Module | None) -> Tensor:
    """Weights with a row per output ``[outputs, inputs]``; GPT-2's Conv1D stores them transposed."""
    weight = layer.weight  # type: ignore[union-attr]
    assert isinstance(weight, Tensor)
    return weight.mT if isinstance(layer, Conv1D) else weight


def _by_head(rows: Tensor, per_head: int) -> Tensor:
    return rows.unflatten(0, (-1, per_head))


def _shared(weights: Tensor, heads: int) -> Tensor:
    return weights.repeat_interleave(heads // weights.shape[0], dim=0)

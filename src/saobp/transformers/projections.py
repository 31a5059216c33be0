"""The query and key weights of an attention module, head by head."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from saobp.transformers.apply import head_count

SEPARATE = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"), ("q", "k"), ("wq", "wk"))
FUSED = ("c_attn", "Wqkv", "qkv_proj", "qkv", "att_proj")
"""One matrix with all queries first, then all keys, then all values."""
INTERLEAVED = ("query_key_value",)
"""One matrix with query, key and value of the first head, then of the second, and so on."""


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
    """Weights with a row per output ``[outputs, inputs]``; GPT-2's Conv1D stores them the other way."""
    weight = layer.weight  # type: ignore[union-attr]
    assert isinstance(weight, Tensor)
    return weight.mT if isinstance(layer, Conv1D) else weight


def _by_head(rows: Tensor, per_head: int) -> Tensor:
    return rows.unflatten(0, (-1, per_head))


def _shared(weights: Tensor, heads: int) -> Tensor:
    return weights.repeat_interleave(heads // weights.shape[0], dim=0)

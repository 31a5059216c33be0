"""Scale the queries and keys of single heads, through the weights that make them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saobp.transformers.apply import head_count
from saobp.transformers.projections import FUSED, INTERLEAVED, SEPARATE

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
        if getattr(module, "has_position_bias", False):
            raise ValueError(
                f"{type(module).__name__} adds a bias of positions to its logits, which does not follow from "
                "its query and key weights, so they cannot be clipped there"
            )
        self.heads = head_count(module)
        self.query, self.key = self._parts(module)
        self.key_heads = len(self.key[0])

    def scale(self, query: Tensor, key: Tensor) -> None:
        """Multiply by ``query [heads]`` and ``key [key heads]``, in place."""
        with torch.no_grad():
            for parts, factors in ((self.query, query), (self.key, key)):
                for part in parts:
                    part.mul_(factors.to(part.dtype).view(-1, *[1] * (part.ndim - 1)))

    def _parts(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        for query_name, key_name in SEPARATE:
            both = getattr(module, query_name, None), getattr(module, key_name, None)
            if all(map(_is_plain, both)):
                query, key = (_rows(layer) for layer in both)
                dim = len(query[0]) // self.heads
                return _by_head(query, dim), _by_head(key, dim)
        for name in FUSED:
            if _is_plain(layer := getattr(module, name, None)):
                rows = _rows(layer)
                dim = getattr(module, "head_dim", None) or len(rows[0]) // (3 * self.heads)
                queries = self.heads * dim
                keys = (len(rows[0]) - queries) // 2
                query = [part[:queries] for part in rows]
                return _by_head(query, dim), _by_head([part[queries : queries + keys] for part in rows], dim)
        for name in INTERLEAVED:
            layer = getattr(module, name, None)
            if _is_plain(layer) and len(_rows(layer)[0]) % (3 * self.heads) == 0:
                parts = [part.unflatten(0, (self.heads, 3, -1)) for part in _rows(layer)]
                return [part[:, 0] for part in parts], [part[:, 1] for part in parts]
        raise ValueError(
            f"{type(module).__name__} has no query and key weights of plain linear layers under a name that "
            "saobp knows, so they cannot be scaled"
        )


def _is_plain(layer: object) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, nn.Linear | Conv1D) and type(layer.weight) in (nn.Parameter, Tensor)


def _rows(layer: Any) -> list[Tensor]:
    """Weights with a row per output, and the bias if there is one, without gradient tracking."""
    weight = layer.weight.detach()
    weight = weight if isinstance(layer, nn.Linear) else weight.mT
    return [weight] if layer.bias is None else [weight, layer.bias.detach()]


def _by_head(rows: list[Tensor], dim: int) -> list[Tensor]:
    return [part.unflatten(0, (-1, dim)) for part in rows]

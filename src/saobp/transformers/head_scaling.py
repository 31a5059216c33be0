"""Scale the queries and keys of single heads, through the weights that make them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saobp.transformers.projections import is_linear, split_by_head, weight_rows

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
        found = split_by_head(module, _detached_rows, _is_plain)
        if found is None:
            raise ValueError(
                f"{type(module).__name__} has no query and key weights of plain linear layers under a name "
                "that saobp knows, so they cannot be scaled"
            )
        self.query, self.key = found
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

"""Attention maps that a model returned, read as the inputs of statistics: padding, causality and checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from saobp.metrics.attention_inputs import PLAIN, AttentionInputs
from saobp.metrics.functional.maps import Maps, row_tolerance, unchecked_maps
from saobp.propagation.graph import FactorGraph

NARROWEST_WINDOW = 64
"""A window less wide is not told from heads that all look nearby."""


@dataclass(frozen=True, kw_only=True)
class KnownMaps(AttentionInputs):
    """Maps ``[batch, heads, length, length]`` in the place of queries and keys, which are empty.

    They cannot be sampled.
    """

    rows: Tensor

    def texts(self, items: slice | Tensor) -> KnownMaps:
        chosen: Any = super().texts(items)
        return replace(chosen, rows=self.rows[items])

    def select(self, items: slice, heads: slice) -> KnownMaps:
        chosen: Any = super().select(items, heads)
        return replace(chosen, rows=chosen.rows[:, heads])

    def unpadded_text(self, item: int) -> KnownMaps:
        text: Any = super().unpadded_text(item)
        if self.padding_mask is None:
            return text
        real = self.padding_mask[item].nonzero()[:, 0]
        return replace(text, rows=text.rows[:, :, real][..., real])

    def scores(self) -> tuple[Tensor, FactorGraph]:
        """Logarithms of the rows, whose softmax is the rows."""
        rows = self.rows.to(torch.promote_types(self.rows.dtype, torch.float32))
        return rows.log(), FactorGraph(rows > 0, causal=self.causal)

    def maps(self) -> Maps:
        return unchecked_maps(self.rows, self.padding_mask)


def known_maps(rows: Tensor, mask: Tensor | None, owner: str, *, after_dropout: bool = False) -> KnownMaps:
    """Maps of a layer ``[batch, heads, length, length]`` under a mask ``[batch, length]``, 0 for padding.

    Without a mask, keys to which no row of a layer without causality attends are padding. ``owner`` names
    the model in errors; ``after_dropout`` says that entries may have been dropped.
    """
    rows, length = rows.detach(), rows.shape[-1]
    precise = rows.to(torch.promote_types(rows.dtype, torch.float32))
    real = None if mask is None else _real_tokens(mask, rows, owner)
    causal, window = _extent(precise, real)
    if real is None and not causal:
        seen = (precise > 0).any(1).any(1)
        real = None if bool(seen.all()) else seen
    _check_rows(precise, real, rows.dtype, owner, after_dropout)
    empty = rows.new_zeros(*rows.shape[:2], length, 1)
    return KnownMaps(
        query=empty,
        key=empty,
        strength=rows.new_zeros(rows.shape[1], dtype=torch.float32),
        refinement=PLAIN,
        causal=causal,
        scale=1.0,
        padding_mask=real,
        window=window,
        rows=rows,
    )


def _real_tokens(mask: Tensor, rows: Tensor, owner: str) -> Tensor:
    if mask.shape != (rows.shape[0], rows.shape[-1]):
        raise ValueError(
            f"{owner} returns maps {list(rows.shape)} for an attention mask {list(mask.shape)}, so saobp "
            "does not know which of their tokens are real: it needs a mask of as many texts and tokens"
        )
    return mask.to(rows.device).bool()


def _extent(rows: Tensor, real: Tensor | None) -> tuple[bool, int | None]:
    """Whether no row attends to a later key, and the window if all distant keys are hidden too."""
    seen = rows > 0
    if real is not None:
        seen = seen & real[:, None, :, None] & real[:, None, None, :]
    anywhere = seen.any(0).any(0)
    distance = torch.arange(len(anywhere), device=rows.device)
    distance = distance[:, None] - distance
    reach = int(distance.abs()[anywhere].max()) + 1 if bool(anywhere.any()) else len(anywhere)
    tokens = len(anywhere) if real is None else int(real.sum(-1).max())
    return not bool(anywhere.triu(1).any()), reach if NARROWEST_WINDOW <= reach < tokens else None


def _check_rows(
    rows: Tensor, real: Tensor | None, dtype: torch.dtype, owner: str, after_dropout: bool
) -> None:
    sums = (rows if real is None else rows * real[:, None, None, :]).sum(-1)
    away = (sums - 1).abs()
    if real is not None:
        away = away.masked_fill(~real[:, None, :], 0.0)
    worst = float(away.max()) if away.numel() else 0.0
    if worst <= row_tolerance(dtype):
        return
    cure = ": call model.eval(), since it returns them after dropout" if after_dropout else ""
    raise ValueError(
        f"{owner} returns maps whose rows do not sum to 1 over real tokens (one is off by {worst:.2g}), so "
        f"saobp cannot measure them{cure}"
    )

"""Which path a call of attention takes, and why, without computing it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saobp.functional import read_call
from saobp.kernels.dispatch import Path, select


def explain(first: Tensor, *others: Any, **options: Any) -> Path:
    """``print(saobp.explain(query, key, value, refinement, ...))`` says who computes that call, and why.

    Arguments are those of :func:`saobp.attention`. Gradients, autocast and the like count as they would for
    the call itself; nothing is computed.
    """
    if not isinstance(first, Tensor):
        raise TypeError(f"explain takes what saobp.attention takes, beginning with a query, not {first!r}")
    return select(read_call(first, *others, **options).call)

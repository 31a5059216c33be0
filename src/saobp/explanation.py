"""Which path a call of attention takes, and why, without computing it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saobp.functional import call_strength, check_lengths, check_numbers, check_padding, check_states
from saobp.kernels.dispatch import Backend, Call, Path, select
from saobp.refinement import Refinement


def explain(first: Tensor, *others: Any, **options: Any) -> Path:
    """``print(saobp.explain(query, key, value, refinement, ...))`` says who computes that call, and why.

    Arguments are those of :func:`saobp.attention`. Gradients, autocast and the like count as they would for
    the call itself; nothing is computed.
    """
    if not isinstance(first, Tensor):
        raise TypeError(f"explain takes what saobp.attention takes, beginning with a query, not {first!r}")
    return explain_call(first, *others, **options)


def explain_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement | str,
    *,
    padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
    strength: Tensor | None = None,
    strongest: float | None = None,
) -> Path:
    refinement = Refinement.of(refinement)
    check_states(query, key, value)
    check_numbers(dropout_p, scale, strongest)
    check_lengths(query.shape[2], key.shape[2], refinement, is_causal)
    if padding_mask is not None:
        check_padding(padding_mask, (query.shape[0], key.shape[2]), query.device)
    strongest = refinement.strongest if strength is None else strongest
    strength = call_strength(refinement, strength, query.shape[1], query.device)
    call = Call.of(
        query, key, value, refinement, strength, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
        backend=backend, strongest=strongest,
    )  # fmt: skip
    return select(call)

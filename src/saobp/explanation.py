"""Which path a call of attention takes, and why, without computing it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saobp.functional import read_call
from saobp.kernels.call_spec import CallSpec, CallTensors
from saobp.kernels.dispatch import Path, numbers_of, select


def explain(first: Tensor, *others: Any, **options: Any) -> Path:
    """``print(saobp.explain(query, key, value, refinement, ...))`` says who computes that call, and why.

    Arguments are those of :func:`saobp.attention`. Gradients, autocast and the like count as they would for
    the call itself; nothing is computed.
    """
    if not isinstance(first, Tensor):
        raise TypeError(f"explain takes what saobp.attention takes, beginning with a query, not {first!r}")
    read = read_call(first, *others, **options)
    call, states = read.call, (read.query, read.key, read.value)
    path = select(call)
    if path.family is None:
        return path
    from saobp.kernels.runtime.launcher import kernels_for

    known = None if read.strength.requires_grad else call.strongest
    numbers = numbers_of(
        call.refinement.factor, call.query[2], call.query[3], call.scale, call.dropout_p, known
    )
    spec = CallSpec.of(CallTensors(*states, read.strength, read.padding_mask), numbers)
    return path._replace(kernels=kernels_for(path.family, spec, *states))

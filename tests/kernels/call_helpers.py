"""For tests of kernels: CallSpec of tensors, and clearing of cached plans."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saobp.kernels.call_spec import CallNumbers, CallSpec, CallTensors
from saobp.kernels.dispatch import TRITON_FOUND


def spec_of(query: Tensor, key: Tensor, mask: Tensor | None, cu: Tensor | None, *numbers: Any) -> CallSpec:
    """Of numbers as in :class:`CallNumbers`."""
    return CallSpec.of(CallTensors(query, key, query, query, mask, cu), CallNumbers(*numbers))


def clear_plans() -> None:
    """Launch plans are cached; a test that changes what they are made of clears them."""
    if not TRITON_FOUND:
        return
    from saobp.kernels.bidirectional import launch
    from saobp.kernels.fused import FAMILIES
    from saobp.kernels.masked import launch as masked_launch

    launch._plans.clear()
    masked_launch._plans.clear()
    for family in FAMILIES.values():
        family.plans.clear()

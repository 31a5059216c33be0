"""Strict causal kernels of weak strength on sinks: errors that rows share add up in one key's gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import attention_inputs, collapsed_inputs, drifting_inputs

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float16
REFINEMENT = Refinement("high", 0.2)


def operation(query: Tensor, key: Tensor, value: Tensor, _: Tensor) -> Tensor:
    return saobp.attention(query, key, value, REFINEMENT, is_causal=True, backend="fused")


@pytest.mark.usefixtures("weak_way")
def test_messages_are_not_lost_beside_larger_terms() -> None:
    """A sink's key gradient is the sum of terms smaller than the last digit of what they are added to."""
    inputs = attention_inputs(1, 1, 192, 16, strength=0.2, dtype=DTYPE, device=DEVICE)
    inputs = drifting_inputs(collapsed_inputs(inputs, 7.0), 64 * torch.finfo(DTYPE).eps)
    assert_within_budget(operation, inputs, REFINEMENT, is_causal=True, frozen=True)


@pytest.mark.skipif(not GPU, reason="sixteen heads of over a thousand rows take the interpreter minutes")
@pytest.mark.parametrize("gap", [5.0, 6.5, 8.0, 12.0, 18.0, 25.0])
def test_long_sinks(gap: float) -> None:
    """Many heads, because the error sits in one entry of each.

    Of a single head even eager's own error, on other numbers, would be as much as 2.9 times the budget.
    """
    inputs = attention_inputs(1, 16, 1100, 64, strength=0.2, dtype=DTYPE, device=DEVICE)
    inputs = collapsed_inputs(inputs, gap)
    assert_within_budget(operation, inputs, REFINEMENT, is_causal=True, frozen=True)

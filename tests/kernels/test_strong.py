"""Strengths near their bound: what half precision has no range for is refused, the rest is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.arguments import BoundedStrength
from saobp.kernels.dispatch import HALF_MAX_STRENGTH
from saobp.testing.inputs import attention_inputs, collapsed_inputs

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def attend(*states: Tensor, backend: str = "fused", **options: object) -> Tensor:
    refinement = options.pop("refinement", Refinement("high"))
    return saobp.attention(*states, refinement, backend=backend, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 15, 140])
def test_the_strongest_allowed_stay_finite_on_collapsed_heads(
    length: int, causal: bool, dtype: torch.dtype
) -> None:
    """Scores of hundreds leave 1e-5 of rounding in a weight of 1: less than 1 - gamma, or messages fail."""
    strength = 16.0 if dtype == torch.float32 else HALF_MAX_STRENGTH
    inputs = attention_inputs(1, 2, length, 40, strength=strength, dtype=dtype, device=DEVICE)
    inputs = collapsed_inputs(inputs, 40.0)
    states = (inputs.query, inputs.key, inputs.value)
    found = attend(*states, strength=inputs.strength, scale=1.0, is_causal=causal)
    assert found.isfinite().all()
    if length == 1:
        torch.testing.assert_close(found, inputs.value)


def test_not_a_number_is_not_hidden() -> None:
    """The messages of a row of NaN are NaN, as in the specification."""
    inputs = attention_inputs(1, 1, 9, 16, device=DEVICE)
    query = inputs.query.clone()
    query[0, 0, 4] = torch.nan
    for backend in ("fused", "reference"):
        assert (
            attend(query, inputs.key, inputs.value, strength=inputs.strength, backend=backend).isnan().all()
        )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("factor", ["low", "low-listing", "high"])
def test_strengths_beyond_half_precision_are_refused(factor: str, dtype: torch.dtype) -> None:
    states = [torch.randn(1, 1, 8, 16, device=DEVICE, dtype=dtype) for _ in range(3)]
    with pytest.raises(ValueError, match=f"strength 9 is more than the 8 that {dtype} has range for"):
        attend(*states, refinement=Refinement(factor, 9.0))
    assert attend(*states, refinement=Refinement(factor, 8.0)).isfinite().all()
    single = [x.float() for x in states]
    expected = attend(*single, refinement=Refinement(factor, 16.0), backend="reference")
    found = attend(*single, refinement=Refinement(factor, 16.0))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_bound_beyond_the_largest_strength_is_that_strength() -> None:
    inputs = attention_inputs(1, 2, 9, 16, strength=2.0, device=DEVICE)
    states = (inputs.query, inputs.key, inputs.value)
    for factor in ("high", "low"):
        expected = attend(*states, strength=inputs.strength, refinement=Refinement(factor))
        bounded = BoundedStrength(inputs.strength, 1e4)
        found = attend(*states, strength=bounded, refinement=Refinement(factor))
        torch.testing.assert_close(found, expected)

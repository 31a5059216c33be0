"""Strengths up to 16 in single precision on saturated rows, against double precision."""

from __future__ import annotations

import pytest
import torch

import saobp
from saobp.testing.inputs import attention_inputs


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("factor", ["high", "high-listing"])
@pytest.mark.parametrize("strength", [8, 12, 16])
def test_saturated_rows_are_as_exact_as_plain_attention(
    strength: int, factor: str, causal: bool, backend: str
) -> None:
    for sharpness in (4.0, 10.0, 30.0):
        inputs = attention_inputs(2, 2, 64, 16)
        states = [inputs.query * sharpness, inputs.key, inputs.value]
        options = {"is_causal": causal, "backend": backend}

        def error(refinement: str, states: list = states, options: dict = options) -> float:
            exact = saobp.attention(*(x.double() for x in states), refinement, **options)
            return float((saobp.attention(*states, refinement, **options) - exact).abs().max())

        assert error(f"{factor}:{strength}") < 10 * error("none")


def test_gradients_at_the_largest_strength() -> None:
    inputs = attention_inputs(1, 2, 32, 16)
    found = {}
    for dtype in (torch.float32, torch.float64):
        leaves = [(x * s).to(dtype).requires_grad_() for x, s in ((inputs.query, 10.0), (inputs.key, 1.0))]
        strength = torch.tensor([16.0, 12.0], dtype=dtype, requires_grad=True)
        out = saobp.attention(*leaves, inputs.value.to(dtype), "high", strength=strength)
        found[dtype] = torch.autograd.grad(out.square().sum(), [*leaves, strength])
    for single, double in zip(*found.values(), strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-3 * float(double.abs().max()))

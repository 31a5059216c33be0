"""Analytic gradients against differences in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import saobp
from saobp.testing.inputs import attention_inputs

FACTORS = ["none", "high", "low", "elemmul", "high-listing", "low-listing", "elemmul-prior"]
CASES = [(factor, order) for factor in FACTORS for order in ("bidirectional", "strict")]
CASES += [("high", "paper"), ("low", "paper")]


@pytest.mark.filterwarnings("ignore:future='paper'")
@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("factor", "order"), CASES)
def test_gradients_of_scores_values_and_strengths(
    factor: str, order: str, steps: int, padding: str | None
) -> None:
    """Left padding and causality give rows that see no key, too."""
    inputs = attention_inputs(2, 2, 4, 3, strength=(0.8, -0.6), padding=padding, dtype=torch.float64)  # type: ignore[arg-type]
    refinement = saobp.Refinement(
        factor,
        steps=steps,
        damping=0.3 if steps > 1 else 0.0,
        future="paper" if order == "paper" else "strict",
    )

    def operation(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return saobp.attention(
            query,
            key,
            value,
            refinement,
            padding_mask=inputs.padding_mask,
            is_causal=order != "bidirectional",
            strength=strength,
        )

    torch.autograd.gradcheck(operation, inputs.leaves(), fast_mode=True)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_through_refine(factor: str, causal: bool) -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 4, 4, generator=random, dtype=torch.float64).softmax(-1).requires_grad_()
    strength = torch.tensor([0.5, -1.5], dtype=torch.float64, requires_grad=True)
    refinement = saobp.Refinement(factor)

    def operation(rows: Tensor, strength: Tensor) -> Tensor:
        return saobp.refine(rows, refinement, is_causal=causal, strength=strength)

    torch.autograd.gradcheck(operation, (rows, strength))


def test_strength_learns_from_zero() -> None:
    """A learned strength starts at 0, so its gradient must be alive there."""
    inputs = attention_inputs(strength=0.0, dtype=torch.float64)
    query, key, value, strength = inputs.leaves()
    saobp.attention(query, key, value, saobp.Refinement("high"), strength=strength).square().sum().backward()
    assert strength.grad is not None
    assert (strength.grad.abs() > 1e-4).all()

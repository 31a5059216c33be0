"""How wrong a faster path may be: at most twice as wrong as the plain one in the same precision.

Errors are measured against the specification in double precision, on the very numbers (already rounded)
that the candidate sees. No tolerance is picked by hand: the data and the precision set it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saobp.attention import attention
from saobp.refinement import Refinement
from saobp.testing.inputs import AttentionInputs

Operation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""query, key, value, strength to output."""

TIMES = 2.0
ROUNDINGS = 2.0


@dataclass(frozen=True)
class Error:
    """Errors of one result: worst entry and root mean square, and what they may be."""

    name: str
    worst: float
    worst_allowed: float
    typical: float
    typical_allowed: float

    @property
    def within(self) -> bool:
        return self.worst <= self.worst_allowed and self.typical <= self.typical_allowed

    def __str__(self) -> str:
        return (
            f"{self.name}: worst {self.worst:.2e} (allowed {self.worst_allowed:.2e}), "
            f"typical {self.typical:.2e} (allowed {self.typical_allowed:.2e})"
        )


def assert_within_budget(
    candidate: Operation,
    inputs: AttentionInputs,
    refinement: Refinement,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    gradients: bool = True,
) -> list[Error]:
    """Hold output and gradients of query, key, value and strength to the budget; returns what was measured.

    The device is that of ``inputs``. Each result may be off by twice the plain path's error, plus a few
    roundings of its largest entry. A strength has too few entries for one error to be a fair sample, so
    there the plain path's error also counts as no less than what rounding the inputs once more would do.
    """

    def specification(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return attention(
            query,
            key,
            value,
            refinement,
            padding_mask=inputs.padding_mask,
            is_causal=is_causal,
            scale=scale,
            strength=strength,
            backend="reference",
        )

    double = inputs.to(torch.float64)
    exact = run(specification, double, gradients)
    plain = run(specification, inputs, gradients)
    found = run(candidate, inputs, gradients)
    wobble = 0.0
    if gradients:
        wobble = max(
            _worst(
                run(specification, _jittered(double, inputs.dtype, seed), True)["strength"], exact["strength"]
            )
            for seed in range(3)
        )
    rounding = torch.finfo(inputs.dtype).eps
    errors = []
    for name, truth in exact.items():
        got = found[name]
        if got.shape != truth.shape:
            raise AssertionError(f"{name} has shape {tuple(got.shape)} instead of {tuple(truth.shape)}")
        if not torch.isfinite(got).all():
            raise AssertionError(f"{name} has entries that are not finite")
        slack = ROUNDINGS * rounding * float(truth.abs().max()) if truth.numel() else 0.0
        floor = wobble if name == "strength" else 0.0
        errors.append(
            Error(
                name,
                _worst(got, truth),
                TIMES * max(_worst(plain[name], truth), floor) + slack,
                _typical(got, truth),
                TIMES * max(_typical(plain[name], truth), floor) + slack,
            )
        )
    outside = [str(error) for error in errors if not error.within]
    if outside:
        raise AssertionError("outside the error budget: " + "; ".join(outside))
    return errors


def run(operation: Operation, inputs: AttentionInputs, gradients: bool = True) -> dict[str, Tensor]:
    """Output and, if asked for, the gradient of each input, by name."""
    leaves = inputs.leaves()
    output = operation(*leaves)
    results = {"output": output.detach()}
    if gradients:
        found = torch.autograd.grad(output, leaves, inputs.output_gradient, allow_unused=True)
        for name, leaf, gradient in zip(("query", "key", "value", "strength"), leaves, found, strict=True):
            results[name] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def _jittered(inputs: AttentionInputs, precision: torch.dtype, seed: int) -> AttentionInputs:
    """Every number moved by up to half a rounding step of ``precision``, at random."""
    random = torch.Generator().manual_seed(seed)
    step = torch.finfo(precision).eps

    def moved(states: Tensor) -> Tensor:
        noise = torch.rand(states.shape, generator=random, dtype=torch.float64) - 0.5
        return states * (1 + step * noise.to(states.device))

    return replace(
        inputs,
        query=moved(inputs.query),
        key=moved(inputs.key),
        value=moved(inputs.value),
        output_gradient=moved(inputs.output_gradient),
    )


def _worst(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth.double()).abs().max()) if truth.numel() else 0.0


def _typical(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth.double()).pow(2).mean().sqrt()) if truth.numel() else 0.0

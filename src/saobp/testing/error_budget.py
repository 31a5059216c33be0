"""Error budget of a faster path: at most twice the error of the plain one in the same precision.

Errors are measured against the specification in double precision, on the same (already rounded) inputs. The
data and the precision set the scale. The small multiples of a rounding are empirical: tight enough to catch a
gamma off by 1e-4 (float32), 1 % (float16) or 10 % (bfloat16), wide enough for sound float32 arithmetic on
collapsed heads. In bfloat16 a gamma off by 3 % passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saobp.functional import attention
from saobp.propagation.reference import share_heads
from saobp.refinement import Refinement
from saobp.testing.inputs import AttentionInputs

Operation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""query, key, value, strength to output."""


class Distance(NamedTuple):
    """Largest and root-mean-square difference."""

    worst: float
    typical: float


@dataclass(frozen=True)
class Error:
    """Error of one result and its limit."""

    name: str
    found: Distance
    allowed: Distance

    @property
    def within(self) -> bool:
        return self.found.worst <= self.allowed.worst and self.found.typical <= self.allowed.typical

    def __str__(self) -> str:
        return (
            f"{self.name}: worst {self.found.worst:.2e} (allowed {self.allowed.worst:.2e}), "
            f"typical {self.found.typical:.2e} (allowed {self.allowed.typical:.2e})"
        )


def assert_within_budget(
    candidate: Operation,
    inputs: AttentionInputs,
    refinement: Refinement,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    gradients: bool = True,
    frozen: bool = False,
    attn_mask: Tensor | None = None,
    sliding_window: int | None = None,
) -> list[Error]:
    """Assert that output and gradients are within the budget; returns the measured errors.

    The device is that of ``inputs``. Each result may be off by twice the plain path's error, plus rounding
    the result once and the terms it sums up twice. A ``frozen`` strength has no gradient.
    """
    scale = inputs.query.shape[-1] ** -0.5 if scale is None else scale
    specification = operation_of(
        refinement, inputs, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
        sliding_window=sliding_window, backend="reference",
    )  # fmt: skip
    double = inputs.to(torch.float64)
    arithmetic = torch.promote_types(inputs.dtype, torch.float32)
    exact = run(specification, double, gradients)
    if frozen:
        exact.pop("strength", None)
    expected = _plain_errors(specification, inputs, exact, arithmetic, gradients)
    found = run(candidate, inputs, gradients)
    sizes = _sizes_before_cancellation(double, scale)
    result_step, term_step = torch.finfo(inputs.dtype).eps / 2, 2 * torch.finfo(arithmetic).eps
    errors = []
    for name, truth in exact.items():
        got = found[name]
        if got.shape != truth.shape:
            raise AssertionError(f"{name} has shape {tuple(got.shape)} instead of {tuple(truth.shape)}")
        if not torch.isfinite(got).all():
            raise AssertionError(f"{name} has entries that are not finite")
        allowed = Distance(
            *(
                2 * error + result_step * size + term_step * terms
                for error, size, terms in zip(expected[name], _size(truth), sizes[name], strict=True)
            )
        )
        errors.append(Error(name, distance(got, truth), allowed))
    outside = [str(error) for error in errors if not error.within]
    if outside:
        raise AssertionError("outside the error budget: " + "; ".join(outside))
    return errors


def _plain_errors(
    specification: Operation,
    inputs: AttentionInputs,
    exact: dict[str, Tensor],
    arithmetic: torch.dtype,
    gradients: bool,
) -> dict[str, Distance]:
    """Error of the plain path in the precision of ``inputs``, by result.

    Where the plain path is right by luck, its error counts as no less than what moving the inputs and, one by
    one, the scores by a rounding of the arithmetic (float32 or better) would do; for a strength, which has
    too few entries for one error to be a fair sample, a rounding of the inputs' own precision.
    """
    double, dim = inputs.to(torch.float64), inputs.query.shape[-1]
    plain = run(specification, inputs, gradients)
    errors = {name: distance(plain[name], truth) for name, truth in exact.items()}
    for seed in range(3):
        moved = run(
            specification, _scores_moved(_jittered(double, arithmetic, seed), arithmetic, seed), gradients
        )
        for name in moved.keys() & {"query", "key"}:
            moved[name] = moved[name][..., :dim]
        if gradients and inputs.dtype != arithmetic:
            moved["strength"] = run(specification, _jittered(double, inputs.dtype, seed))["strength"]
        for name, truth in exact.items():
            errors[name] = Distance(*map(max, errors[name], distance(moved[name], truth)))
    return errors


def operation_of(refinement: Refinement, inputs: AttentionInputs, **options: Any) -> Operation:
    """:func:`saobp.attention` as a function of states and strengths, with the padding of ``inputs``."""

    def operation(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        own = {"padding_mask": inputs.padding_mask, "strength": strength, **options}
        return attention(query, key, value, refinement, **own)

    return operation


def run(operation: Operation, inputs: AttentionInputs, gradients: bool = True) -> dict[str, Tensor]:
    """Output and, optionally, the gradient of each input, by name."""
    leaves = inputs.leaves()
    output = operation(*leaves)
    results = {"output": output.detach()}
    if gradients:
        found = torch.autograd.grad(output, leaves, inputs.output_gradient, allow_unused=True)
        for name, leaf, gradient in zip(("query", "key", "value", "strength"), leaves, found, strict=True):
            results[name] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def distance(got: Tensor, truth: Tensor) -> Distance:
    """How far apart two results are, in double precision."""
    return _size(got.double() - truth.double())


def _jittered(inputs: AttentionInputs, precision: torch.dtype, seed: int) -> AttentionInputs:
    """Every number moved by up to one rounding step of ``precision``, at random."""
    random = torch.Generator().manual_seed(seed)
    step = torch.finfo(precision).eps

    def moved(states: Tensor) -> Tensor:
        noise = 2 * torch.rand(states.shape, generator=random, dtype=torch.float64) - 1
        return states * (1 + step * noise.to(states.device))

    return replace(
        inputs,
        query=moved(inputs.query),
        key=moved(inputs.key),
        value=moved(inputs.value),
        output_gradient=moved(inputs.output_gradient),
    )


def _scores_moved(inputs: AttentionInputs, precision: torch.dtype, seed: int) -> AttentionInputs:
    """Each score moved by itself, by up to one rounding step of its terms, through added head dims.

    Where rows sit on few keys with large scores, the order in which a product adds up its terms decides the
    error, and libraries differ in it. Moving inputs moves a key's scores alike, which refined rows even out.
    """
    random = torch.Generator().manual_seed(seed + 100)
    query, key = inputs.query, inputs.key
    rows = torch.eye(query.shape[2], dtype=query.dtype, device=query.device).expand(*query.shape[:2], -1, -1)
    shared = query.unflatten(1, (key.shape[1], -1)).abs().amax(2)
    terms = key.abs() @ shared.transpose(-1, -2)
    noise = 2 * torch.rand(terms.shape, generator=random, dtype=torch.float64) - 1
    steps = torch.finfo(precision).eps * noise.to(terms.device) * terms
    return replace(inputs, query=torch.cat([query, rows], -1), key=torch.cat([key, steps], -1))


def _sizes_before_cancellation(inputs: AttentionInputs, scale: float) -> dict[str, Distance]:
    """Size of the terms that each result sums up; a collapsed head's gradient is 0 as their difference."""
    value = share_heads(inputs.value, inputs.query.shape[1])
    pull = _size(inputs.output_gradient @ value.transpose(-1, -2))

    # A strength sums the pull on every row through the message of every other, up to e^strength each.
    batch, _, rows, _ = inputs.query.shape
    strongest = float(inputs.strength.abs().max()) if inputs.strength.numel() else 0.0
    together = pull.worst * math.exp(strongest) * rows**1.5 * batch**0.5

    def pulled(states: Tensor) -> Distance:
        return Distance(*(abs(scale) * force * _size(states).worst for force in pull))

    return {
        "output": _size(inputs.value),
        "query": pulled(inputs.key),
        "key": pulled(inputs.query),
        "value": _size(inputs.output_gradient),
        "strength": Distance(together, together),
    }


def _size(values: Tensor) -> Distance:
    if not values.numel():
        return Distance(0.0, 0.0)
    return Distance(float(values.abs().max()), float(values.double().pow(2).mean().sqrt()))

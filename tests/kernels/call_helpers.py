"""For tests of kernels: calls, CallSpec of tensors, clearing of cached plans, what is slow without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from saobp.arguments import BoundedStrength
from saobp.kernels.call_spec import CallNumbers, CallSpec, CallTensors
from saobp.kernels.dispatch import TRITON_FOUND
from saobp.refinement import Refinement
from saobp.testing.error_budget import Operation, operation_of, run
from saobp.testing.inputs import AttentionInputs, attention_inputs

SLOW_INTERPRETED = () if torch.cuda.is_available() else pytest.mark.slow
"""Marks of a parameter that Triton's interpreter takes long for."""


def slow_interpreted(test: Callable) -> Callable:
    """Marks a test as slow where kernels run in Triton's interpreter."""
    return test if torch.cuda.is_available() else pytest.mark.slow(test)


def fused_operation(
    refinement: Refinement, inputs: AttentionInputs, bound: float | None = None, **options: Any
) -> Operation:
    """``operation_of`` by kernels; strengths with a known bound do not learn."""
    operation = operation_of(refinement, inputs, backend="fused", **options)
    if bound is None:
        return operation

    def frozen(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return operation(query, key, value, BoundedStrength(strength.detach(), bound))

    return frozen


DROPPED = 0.3
"""Share of entries that ``check_dropout`` drops."""


def check_dropout(
    refinement: Refinement, length: int, dtype: torch.dtype, **options: Any
) -> tuple[AttentionInputs, Tensor]:
    """Kernels drop the same entries in both directions; returns the inputs and the dropped rows.

    Identity values show the mask; with it, all gradients follow from the specification.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = attention_inputs(1, 1, length, length, strength=0.7, dtype=dtype, device=device)
    inputs = replace(inputs, value=torch.eye(length, dtype=dtype, device=device)[None, None])

    def seeded(*leaves: Tensor) -> Tensor:
        torch.manual_seed(5)
        return fused_operation(refinement, inputs, dropout_p=DROPPED, **options)(*leaves)

    dropped = seeded(*inputs.leaves())
    keep = dropped != 0

    def plain(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        eye = torch.eye(length, dtype=query.dtype, device=device)[None, None]
        rows = operation_of(refinement, inputs, backend="reference", **options)
        return (rows(query, key, eye, strength) * keep / (1 - DROPPED)) @ value

    truth, found = run(plain, inputs.to(torch.float64)), run(seeded, inputs)
    allowed = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for name, expected in truth.items():
        difference = float((found[name] - expected).abs().max())
        assert difference <= allowed * max(1.0, float(expected.abs().max())), name
    return inputs, dropped


def spec_of(query: Tensor, key: Tensor, mask: Tensor | None, cu: Tensor | None, *numbers: Any) -> CallSpec:
    """Of numbers as in :class:`CallNumbers`."""
    return CallSpec.of(CallTensors(query, key, query, query, mask, cu), CallNumbers(*numbers))


def forward_and_saved(
    family: str,
    slices: Callable[[CallSpec], tuple[dict[str, Any], int]],
    inputs: AttentionInputs,
    *,
    dropout: float = 0.0,
    sign: float = 1.0,
    receives: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of a family's kernels, and by name the ``slices`` of what they save for the backward pass."""
    from saobp.kernels.fused import FAMILIES

    query, mask = inputs.query, inputs.padding_mask
    numbers = (query.shape[2], query.shape[3] ** -0.5, dropout, sign, receives, 0.0)
    seed = torch.tensor(7, device=query.device)
    out, saved, *_ = FAMILIES[family].forward(
        query, inputs.key, inputs.value, inputs.strength, mask, None, seed, *numbers
    )
    spec = spec_of(query, inputs.key, mask, None, *numbers)
    return out, {name: part.view(saved) for name, part in slices(spec)[0].items()}


def note_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that plans are made for from now on."""
    from saobp.kernels.runtime.launcher import LaunchSequence

    names: list[str] = []
    add = LaunchSequence.add

    def noted(launches: LaunchSequence, kernel: Any, *rest: Any, **named: str) -> None:
        names.append(kernel.__name__)
        add(launches, kernel, *rest, **named)

    monkeypatch.setattr(LaunchSequence, "add", noted)
    return names


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

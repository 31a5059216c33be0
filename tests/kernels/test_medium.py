"""129 to 512 tokens without causality: the whole map in one program on Hopper, row and key sums in one sweep.

Without a GPU they run in Triton's interpreter, in float16; the kernel in Gluon by a stand-in for Gluon.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_helpers import clear_plans
from gluon_on_cpu import OnCpu
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.kernels import dispatch
from saobp.kernels.hopper import launch as hopper_launch
from saobp.kernels.hopper import whole_map
from saobp.kernels.runtime.launcher import LaunchSequence
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)

pytestmark = pytest.mark.skipif(
    GPU and torch.cuda.get_device_capability() != (9, 0), reason="another GPU than Hopper"
)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that plans were made for."""
    names: list[str] = []
    clear_plans()
    add = LaunchSequence.add

    def noted(launches: LaunchSequence, kernel: Any, *rest: Any, **named: str) -> None:
        names.append(kernel.__name__)
        add(launches, kernel, *rest, **named)

    monkeypatch.setattr(LaunchSequence, "add", noted)
    return names


def states(length: int, kind: str, **options: Any) -> AttentionInputs:
    """Of three heads: one that attracts, a strong one, one without strength."""
    strong = 5.0 if GPU else 1.5  # float16 has less range
    options = {"strength": (-0.7, strong, 0.0), "dtype": DTYPE, "device": DEVICE, "seed": length} | options
    inputs = attention_inputs(1, 3, length, 64, **options)
    return collapsed_inputs(inputs, 40.0 if GPU else 3.0, "sink") if kind == "sink" else inputs


def check(inputs: AttentionInputs, factor: str, gradients: bool) -> None:
    refinement = Refinement(factor, "learned")

    def fused(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return saobp.attention(
            query, key, value, refinement, padding_mask=inputs.padding_mask, strength=strength,
            backend="fused",
        )  # fmt: skip

    assert_within_budget(fused, inputs, refinement, gradients=gradients)


@pytest.mark.parametrize(
    ("kind", "length", "factor", "options"),
    [
        ("usual", 256, "high", {"transposed": True}),
        ("padding", 200, "high-key-bias", {"padding": "left"}),
        ("sink", 256, "high", {}),
    ],
)
def test_the_whole_map_in_one_program(
    kind: str, length: int, factor: str, options: dict[str, Any], launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Gradients come from the sweeps, which read what it saved."""
    if not GPU:
        kernel = OnCpu(whole_map.whole_map_forward, {})
        monkeypatch.setattr(hopper_launch, "whole_map_kernel", lambda: kernel)
        monkeypatch.setattr(dispatch, "has_hopper_kernel", lambda capability: capability == 90)
        monkeypatch.setattr(dispatch, "ANY_STRENGTH", DTYPE)
    monkeypatch.setattr(dispatch, "WHOLE_MAP_FROM", 0)
    monkeypatch.setattr(hopper_launch, "WHOLE_MAP_HEADS_EACH", 2)
    check(states(length, kind, **options), factor, gradients=GPU or kind == "padding")
    assert launched[:2] == ["whole_map_forward", "careful_output"]


@pytest.mark.parametrize(
    ("kind", "length", "factor", "options"),
    [
        ("padding", 150, "low-key-bias", {"padding": "both"}),
        ("sink", 300, "high", {}),
    ],
)
def test_sums_in_one_sweep(
    kind: str, length: int, factor: str, options: dict[str, Any], launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(dispatch, "sums_in_one_sweep", lambda spec, capability: True)  # noqa: ARG005
    check(states(length, kind, **options), factor, gradients=GPU)
    assert launched[:3] == ["row_and_key_sums", "key_weights_of_parts", "refined_output"]
    assert "row_sums" not in launched

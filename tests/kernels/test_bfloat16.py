"""bfloat16 in the interpreter of the tests, and kernels that no other test runs there in this type."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on a GPU here", allow_module_level=True)
pytest.importorskip("triton")

from call_helpers import fused_operation, note_launches
from interpreted_bfloat16 import rounded, widened

import saobp
from saobp import Refinement
from saobp.kernels import dispatch
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs


def states(length: int, strength: Any = 0.2, **options: Any) -> AttentionInputs:
    return attention_inputs(1, 2, length, 16, strength=strength, dtype=torch.bfloat16, **options)


def check(
    inputs: AttentionInputs, refinement: Refinement, bound: float | None = None, **options: Any
) -> None:
    operation = fused_operation(refinement, inputs, bound, **options)
    assert_within_budget(operation, inputs, refinement, frozen=bound is not None, **options)


def test_numbers_are_rounded_as_pytorch_rounds_them() -> None:
    numbers = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, 3.4e38])])
    expected = numbers.bfloat16().float()
    assert torch.equal(torch.from_numpy(widened(rounded(numbers.numpy()))), expected)
    assert np.isnan(widened(rounded(np.array([np.nan]))))


@pytest.mark.parametrize("length", [40, 150])
@pytest.mark.parametrize("factor", ["high", "low", "high-key-bias"])
def test_unknown_strengths(factor: Any, length: int) -> None:
    check(states(length, (-0.7, 1.5) if factor == "high" else (0.0, 0.6)), Refinement(factor, "learned"))


@pytest.mark.parametrize("length", [40, 150])
def test_weak_strengths_go_by_the_ways_that_only_bfloat16_has(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = note_launches(monkeypatch)
    check(states(length), Refinement("high", 0.2), 0.2)
    assert launched
    short = {name for name in launched if name.startswith("short")}
    assert bool(short) == (length == 40)


@pytest.mark.parametrize("length", [40, 150])
@pytest.mark.parametrize("strength", [-0.5, 1.0, 3.0])
def test_strict_causal(strength: float, length: int) -> None:
    check(states(length, strength), Refinement("high", "learned"), is_causal=True)


@pytest.mark.parametrize("length", [40, 150])
@pytest.mark.parametrize("gap", [5.0, 90.0])
def test_collapsed_heads(gap: float, length: int) -> None:
    check(collapsed_inputs(states(length, 1.0), gap), Refinement("high", "learned"))


def test_padding_grouped_heads_and_several_steps() -> None:
    inputs = attention_inputs(2, 4, 70, key_heads=2, padding="right", strength=0.7, dtype=torch.bfloat16)
    check(inputs, Refinement("high", "learned"))
    check(states(150, 0.7), Refinement("high", "learned", steps=2))


def test_a_sliding_window() -> None:
    check(states(150, 0.7), Refinement("high", "learned"), sliding_window=33)


@pytest.mark.parametrize("length", [40, 150])
def test_a_causal_key_bias(length: int) -> None:
    check(states(length, (-0.5, 1.0)), Refinement("high-key-bias", "learned"), is_causal=True)


def test_messages_from_every_fourth_row() -> None:
    check(states(150, 0.7), Refinement("high-key-bias", "learned", message_stride=4))


def test_triton_s_own_interpreter_takes_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LACKS_BFLOAT16", True)
    query = torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiplies bfloat16 wrongly"):
        saobp.attention(query, query, query, "high:0.2", backend="fused")

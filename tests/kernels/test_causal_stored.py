"""The strict causal backward pass that stores gradients of scores, against the specification."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from call_helpers import check_dropout, note_launches, spec_of
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.kernels.dispatch import select_kernels
from saobp.testing.error_budget import Operation, assert_within_budget, run
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs, drifting_inputs

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16]
HIGH, LOW = Refinement("high", 0.2), Refinement("low", 0.2)
EACH_FACTOR = pytest.mark.parametrize("refinement", [HIGH, LOW], ids=["high", "low"])
"""Messages that attract have two kernels more, for D."""


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched. Short calls, which have their own kernel, take these too."""
    monkeypatch.setattr("saobp.kernels.dispatch.is_short", lambda *_: False)
    return note_launches(monkeypatch)


def fused(inputs: AttentionInputs, refinement: Refinement = HIGH, **options: Any) -> Operation:
    def operation(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        own = {"strength": strength, "padding_mask": inputs.padding_mask, **options}
        return saobp.attention(query, key, value, refinement, is_causal=True, backend="fused", **own)

    return operation


def check(inputs: AttentionInputs, refinement: Refinement = HIGH) -> None:
    assert_within_budget(fused(inputs, refinement), inputs, refinement, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 37, 64, 129, 192, *([256, 513, 1024] if GPU else [])])
def test_lengths(length: int, dtype: torch.dtype, launched: list[str]) -> None:
    check(attention_inputs(1, 2, length, 64, strength=(0.2, 1.5), dtype=dtype, device=DEVICE))
    assert launched.count("stored_climb") == launched.count("stored_key_gradient") == 1
    assert not {"causal_value_gradient", "weak_climb"} & set(launched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["left", "right", "both"])
@EACH_FACTOR
def test_padding(refinement: Refinement, side: Any, dtype: torch.dtype) -> None:
    inputs = attention_inputs(3, 1, 71, 16, strength=0.7, padding=side, dtype=dtype, device=DEVICE)
    check(inputs, refinement)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("factor", "strength"),
    [
        ("high", -1.0),
        ("high", 0.0),
        ("high", 3.0),
        *(("low", one) for one in (-1.0, 0.0, 0.7, 1.5, 3.0, 5.0)),
    ],
)
def test_strengths(factor: Any, strength: float, seed: int, dtype: torch.dtype, launched: list[str]) -> None:
    inputs = attention_inputs(
        1, 2, 130, 40, key_heads=1, strength=strength, dtype=dtype, device=DEVICE, seed=seed
    )
    check(inputs, Refinement(factor, 0.2))
    assert ("stored_mean_parts" in launched) == (factor == "low")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("strength", "strong"), [(0.5, False), (3.0, True), (5.0, True)])
def test_fixed_attraction(strength: float, strong: bool, dtype: torch.dtype, launched: list[str]) -> None:
    inputs = attention_inputs(
        1, 2, 130, 40, key_heads=1, strength=strength, dtype=dtype, device=DEVICE, seed=1
    )
    refinement = Refinement("low", strength)

    def operation(query: Tensor, key: Tensor, value: Tensor, _: Tensor) -> Tensor:
        return saobp.attention(query, key, value, refinement, is_causal=True, backend="fused")

    assert_within_budget(operation, inputs, refinement, is_causal=True, frozen=True)
    assert ("stored_mean_parts" in launched) == strong


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("collapse", ["sink", "diagonal"])
@pytest.mark.parametrize(("gap", "strength"), [(10.0, 0.5), (18.0, 1.0), (90.0, 1.0)])
@EACH_FACTOR
def test_collapsed_heads(
    refinement: Refinement, gap: float, strength: float, collapse: Any, dtype: torch.dtype
) -> None:
    inputs = attention_inputs(1, 1, 140, 16, strength=strength, dtype=dtype, device=DEVICE)
    check(collapsed_inputs(inputs, gap, collapse), refinement)


@pytest.mark.usefixtures("weak_way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gap", "collapse"), [(0.0, None), (7.0, "sink"), (40.0, "sink"), (40.0, "diagonal")]
)
def test_weak_strengths(gap: float, collapse: Any, dtype: torch.dtype, launched: list[str]) -> None:
    """Messages by polynomials. No head is computed again: weights are logarithms."""
    inputs = attention_inputs(1, 1, 192, 16, strength=0.2, dtype=dtype, device=DEVICE)
    if collapse is not None:
        inputs = drifting_inputs(collapsed_inputs(inputs, gap, collapse), 64 * torch.finfo(dtype).eps)

    def operation(query: Tensor, key: Tensor, value: Tensor, _: Tensor) -> Tensor:
        return saobp.attention(query, key, value, HIGH, is_causal=True, backend="fused")

    assert_within_budget(operation, inputs, HIGH, is_causal=True, frozen=True)
    assert "stored_climb" in launched
    assert not {"causal_value_gradient", "weak_climb"} & set(launched)


@EACH_FACTOR
def test_packed_sequences_do_not_meet(refinement: Refinement) -> None:
    from saobp.kernels.fused import FAMILIES

    lengths = (5, 70, 0, 64)
    inputs = attention_inputs(1, 1, sum(lengths), 16, strength=0.7, dtype=torch.float16, device=DEVICE)
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    query, key, value, strength = inputs.leaves()
    packed, *_ = FAMILIES["causal"].forward(
        query, key, value, strength, None, torch.tensor(bounds, dtype=torch.int32, device=DEVICE), None,
        max(lengths), 0.25, 0.0, 1.0 if refinement is HIGH else -1.0, 1, 0.0,
    )  # fmt: skip
    found = torch.autograd.grad(packed, (query, key, value, strength), inputs.output_gradient)
    wide = [one.detach().float().requires_grad_() for one in (query, key, value, strength)]
    alone = [
        saobp.attention(
            *(one[:, :, a:b] for one in wide[:3]), refinement,
            is_causal=True, strength=wide[3], scale=0.25, backend="reference",
        )
        for a, b in itertools.pairwise(bounds) if a < b
    ]  # fmt: skip
    together = torch.cat(alone, 2)
    expected = torch.autograd.grad(together, wide, inputs.output_gradient.float())
    for one, other in zip((packed, *found), (together, *expected), strict=True):
        assert float((one.float() - other).norm() / other.norm()) < 3e-3


@pytest.mark.parametrize("dtype", DTYPES)
@EACH_FACTOR
def test_dropout_drops_the_same_entries_in_both_directions(
    refinement: Refinement, dtype: torch.dtype
) -> None:
    check_dropout(refinement, 64, dtype, is_causal=True)


@EACH_FACTOR
def test_repeats_are_bit_equal(refinement: Refinement) -> None:
    inputs = attention_inputs(1, 1, 130, 16, strength=1.0, dtype=torch.float16, device=DEVICE)
    first = run(fused(inputs, refinement), inputs)
    for _ in range(100 if GPU else 1):
        again = run(fused(inputs, refinement), inputs)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize(("length", "dim"), [(1025, 16), (70, 80)])
def test_what_it_cannot_take_is_left_to_others(length: int, dim: int) -> None:
    states = torch.zeros(1, 1, length, dim, dtype=torch.float16)
    assert not select_kernels(
        "causal", spec_of(states, states, None, None, length, 0.25, 0.0, 1.0, 1, 0.0)
    ).stored
    states = torch.zeros(1, 1, 130, 16, dtype=torch.float16)
    assert select_kernels("causal", spec_of(states, states, None, None, 130, 0.25, 0.0, 1.0, 1, 0.0)).stored
    assert not select_kernels(
        "causal", spec_of(states, states, None, None, 130, 0.25, 0.0, 1.0, 0, 0.0)
    ).stored

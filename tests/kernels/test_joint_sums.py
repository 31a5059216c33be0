"""Row and key sums of 257 to 512 tokens in one kernel for Hopper: what the sweeps give, and the budget.

Without such a GPU it runs on a CPU in float16, as ``hopper_calls`` has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from call_helpers import (
    SLOW_INTERPRETED,
    clear_plans,
    forward_and_saved,
    fused_operation,
    note_launches,
    spec_of,
)
from gluon_on_cpu import OnCpu
from hopper_calls import (
    DEVICE,
    DTYPE,
    GPU,
    STRENGTHS,
    Taken,
    assert_padding_gives_zeros,
    skip_other_gpus,
    states,
    take_strengths_for_weak,
    use_on_cpu,
)

from saobp import Refinement
from saobp.kernels import dispatch
from saobp.kernels.bidirectional.launch import run_sums, saved_slices
from saobp.kernels.call_spec import WHOLE
from saobp.kernels.hopper import joint_sums
from saobp.kernels.hopper import launch as hopper_launch
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import collapsed_inputs

pytestmark = skip_other_gpus


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that plans were made for; the one for Hopper serves however few the heads are."""
    use_on_cpu(monkeypatch, joint_sums_kernel=OnCpu(joint_sums.joint_sums, {}))
    monkeypatch.setattr(dispatch, "SUMS_MIN_HEADS", 0)
    monkeypatch.setattr(dispatch, "SWEEPS_MAX_LENGTH", WHOLE)
    monkeypatch.setattr(dispatch, "SUMS_DTYPE", DTYPE)
    clear_plans()
    yield note_launches(monkeypatch)
    clear_plans()


forward = partial(forward_and_saved, "long", saved_slices)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"length": 512, "transposed": True}, {}),
    "an uneven number of heads": ({"length": 512, "heads": 3, "strength": (0.0, 0.5, 1.0)}, {}),
    "tail and an uneven number of blocks": ({"length": 300, "heads": 3, "strength": 0.5}, {}),
    "few tokens": ({"length": 257}, {}),
    "few tokens of those that are sent here": ({"length": 449}, {}),
    "padding": ({"length": 512, "padding": "both", "batch": 2}, {}),
    "padding and tail": ({"length": 500, "padding": "left", "batch": 2}, {}),
    "shared key heads": ({"length": 384, "heads": 4, "key_heads": 2, "strength": 0.5}, {}),
    "low": ({"length": 320}, {"sign": -1.0}),
    "strong messages": ({"length": 320, "strength": (-6.0, 8.0)}, {}),
    "dropout": ({"length": 320}, {"dropout": 0.3}),
    "key bias": ({"length": 512}, {"receives": 2}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_gives_what_two_sweeps_give(
    name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, options = CALLS[name]
    inputs = states(**sizes)
    found, saved = forward(inputs, **options)
    assert launched[:2] == ["joint_sums", "refined_output"]
    clear_plans()
    launched.clear()
    monkeypatch.setattr(dispatch, "SUMS_MIN_HEADS", 1 << 60)
    expected, wanted = forward(inputs, **options)
    assert launched[:4] == ["row_sums", "column_messages", "key_weights", "refined_output"]
    eps = torch.finfo(DTYPE).eps
    torch.testing.assert_close(found, expected, rtol=4 * eps, atol=4 * eps)
    for part in ("lse", "message_sums", "weight", "anchor", "inverse", "lowest"):
        torch.testing.assert_close(saved[part], wanted[part], rtol=eps, atol=eps)


@pytest.mark.parametrize("factor", ["high", "low", "high-key-bias"])
@pytest.mark.parametrize(
    "kind", ["usual", pytest.param("padded", marks=SLOW_INTERPRETED), "sink", "diagonal"]
)
def test_output_and_gradients_are_within_the_budget(factor: Any, kind: Any, launched: list[str]) -> None:
    """Learned strengths, with their gradient; ``careful_output`` takes over where rows underflow."""
    strengths = (-0.7, 0.3) if factor == "low" else STRENGTHS
    length = (
        450 if kind in ("usual", "padded") else 290
    )  # in float16 the error of a sink grows with the length
    inputs = states(length, strength=strengths, padding="left" if kind == "padded" else None)
    if kind in ("sink", "diagonal"):
        # Deeper sinks exceed the budget in the sweeps of the backward pass: of `low`, and in float16.
        depth = 1.0 if factor == "low" else 40.0 if GPU else 3.0
        inputs = collapsed_inputs(inputs, depth, kind)
    refinement = Refinement(factor, "learned")
    assert_within_budget(fused_operation(refinement, inputs), inputs, refinement)
    assert {"joint_sums", "refined_output", "careful_output", "value_gradient"} <= set(launched)
    assert "row_sums" not in launched


@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
@pytest.mark.parametrize("kind", ["usual", "sink", "diagonal"])
def test_weak_strengths(factor: Any, kind: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other sweeps for known weak strengths, by polynomials, from what this kernel saves."""
    strength = 0.2 if GPU else 0.05
    take_strengths_for_weak(monkeypatch)
    inputs = states(290, strength=strength, transposed=True)
    if kind in ("sink", "diagonal"):
        inputs = collapsed_inputs(inputs, 5.0, kind)
    refinement = Refinement(factor, strength)
    assert_within_budget(fused_operation(refinement, inputs, strength), inputs, refinement, frozen=True)
    assert "joint_sums" in launched


def test_scores_far_apart(launched: list[str]) -> None:
    """Largest scores of groups of keys may differ by more than the range of float32.

    Messages of the greatest strength stay finite.
    """
    inputs = states(320, strength=16.0)
    inputs.query.mul_(40.0)
    _, saved = forward(inputs)
    scores = inputs.query.double() @ inputs.key.double().transpose(2, 3) / 8
    assert float((scores.amax(3) - scores.amin(3)).max()) > 100
    expected = torch.logsumexp(scores, 3) / math.log(2)
    torch.testing.assert_close(saved["lse"][0].double(), expected, rtol=1e-6, atol=1e-4)
    assert torch.isfinite(saved["message_sums"]).all()
    assert "joint_sums" in launched


def test_a_sequence_of_padding_gives_zeros(launched: list[str]) -> None:
    assert_padding_gives_zeros(states(300, batch=2), Refinement("high", "learned"))
    assert "joint_sums" in launched


def test_programs_that_take_several_heads(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bit by bit to a program for each head, with an even and an uneven number of blocks."""
    for length in (384, 290):
        inputs = states(length, heads=5, strength=(0.3, 8.0, -6.0, 0.1, 1.0))
        found = []
        for programs in (1, 2, 5):
            monkeypatch.setattr(hopper_launch, "multiprocessors", lambda _, programs=programs: programs)
            clear_plans()
            found.append(forward(inputs)[1])
        for part in ("lse", "message_sums", "weight"):
            assert torch.equal(found[0][part], found[1][part])
            assert torch.equal(found[0][part], found[2][part])
    assert launched.count("joint_sums") == 6


def test_what_it_cannot_take_is_left_to_the_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    good, taken = torch.zeros(2, 2, 512, 64, dtype=DTYPE, device=DEVICE), Taken("long", "joint_sums")
    taken.assert_not_for_others(good)
    assert taken(good[:, :, :257])
    assert taken(good, receives=2)
    assert not taken(good[:, :, :256]), "whole_map does"
    monkeypatch.setattr(dispatch, "SUMS_MIN_HEADS", 5)
    assert not taken(good), "too few heads"


def test_sums_alone(launched: list[str]) -> None:
    """Refined weights as an operator need row and key sums without an output."""
    inputs = states(300)
    spec = spec_of(inputs.query, inputs.key, None, None, 300, 0.125, 0.0, 1.0, 1, 0.0)
    run_sums(spec, inputs.query, inputs.key, inputs.strength)
    assert launched == ["joint_sums"]

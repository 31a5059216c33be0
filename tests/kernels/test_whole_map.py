"""The kernel of 129 to 256 tokens for Hopper: what the three sweeps give, and the specification.

Without such a GPU it runs on a CPU in float16, as ``hopper_calls`` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from call_helpers import clear_plans, forward_and_saved, fused_operation, note_launches, spec_of
from gluon_on_cpu import OnCpu
from hopper_calls import (
    DEVICE,
    DTYPE,
    GPU,
    STRENGTHS,
    WHOLE_MAP_CALLS,
    Taken,
    assert_padding_gives_zeros,
    skip_other_gpus,
    states,
    take_strengths_for_weak,
    use_on_cpu,
)
from torch import Tensor

from saobp import Refinement
from saobp.kernels import dispatch
from saobp.kernels.bidirectional.launch import run_sums, saved_slices
from saobp.kernels.fused import FAMILIES
from saobp.kernels.hopper import whole_map
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import collapsed_inputs

pytestmark = skip_other_gpus

ASSEMBLY = {
    whole_map.POWERS_F16.value: lambda raw, scale, minus: tl.exp2(raw * scale + minus).to(tl.float16),
}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that plans were made for; the one for Hopper serves however few the heads are."""
    use_on_cpu(monkeypatch, whole_map_kernel=OnCpu(whole_map.whole_map_forward, ASSEMBLY))
    monkeypatch.setattr(dispatch, "ANY_STRENGTH_DTYPE", DTYPE)
    monkeypatch.setattr(dispatch, "WHOLE_MIN_HEADS", 0)
    clear_plans()
    yield note_launches(monkeypatch)
    clear_plans()


forward = partial(forward_and_saved, "long", saved_slices)


CALLS = WHOLE_MAP_CALLS | {"dropout": ({"length": 256}, {"dropout": 0.3})}


@pytest.mark.parametrize("name", CALLS)
def test_it_gives_what_three_sweeps_give(
    name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, options = CALLS[name]
    inputs = states(**sizes)
    found, saved = forward(inputs, **options)
    clear_plans()
    monkeypatch.setattr(dispatch, "WHOLE_MIN_HEADS", 1 << 60)
    expected, wanted = forward(inputs, **options)
    assert launched[0] == "whole_map_forward"
    assert launched.count("refined_output") == 1
    eps = torch.finfo(DTYPE).eps
    torch.testing.assert_close(found, expected, rtol=4 * eps, atol=4 * eps)
    for part in ("lse", "message_sums", "weight", "anchor", "inverse", "lowest"):
        torch.testing.assert_close(saved[part], wanted[part], rtol=4 * eps, atol=4 * eps)


def test_gradients_with_dropout(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeps go back, however many heads there are, and drop what the forward pass has dropped."""
    monkeypatch.setattr(dispatch, "WHOLE_BACKWARD_MIN_HEADS", 0)
    inputs = states(160, padding="left")
    numbers = (160, 0.125, 0.3, 1.0, 1, 0.0)
    seed = torch.tensor(7, device=DEVICE)

    def gradients() -> tuple[Tensor, ...]:
        leaves = inputs.leaves()
        out = FAMILIES["long"].forward(*leaves, inputs.padding_mask, None, seed, *numbers)[0]
        return torch.autograd.grad(out, leaves, inputs.output_gradient)

    found = gradients()
    assert {"whole_map_forward", "value_gradient"} <= set(launched)
    assert "whole_map_backward" not in launched
    clear_plans()
    monkeypatch.setattr(dispatch, "WHOLE_MIN_HEADS", 1 << 60)
    for got, wanted in zip(found, gradients(), strict=True):
        times = 16 if got.ndim > 1 else 64  # a strength's gradient is what is left of sums over all rows
        largest = float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=0, atol=times * torch.finfo(DTYPE).eps * largest)


@pytest.mark.parametrize("factor", ["high", "low", "high-key-bias"])
@pytest.mark.parametrize("kind", ["usual", "padded", "sink", "diagonal"])
def test_output_and_gradients_are_within_the_budget(factor: Any, kind: Any, launched: list[str]) -> None:
    """Learned strengths, with their gradient; ``careful_output`` takes over where rows underflow."""
    strengths = (-0.7, 1.5) if factor == "low" else STRENGTHS
    padded = {"length": 200, "padding": "left"} if kind == "padded" else {"length": 256}
    inputs = states(**padded, strength=strengths)
    if kind in ("sink", "diagonal"):
        inputs = collapsed_inputs(inputs, 40.0 if GPU else 3.0, kind)
    refinement = Refinement(factor, "learned")
    assert_within_budget(fused_operation(refinement, inputs), inputs, refinement)
    assert {"whole_map_forward", "careful_output", "value_gradient"} <= set(launched)
    assert "refined_output" not in launched


@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
@pytest.mark.parametrize("kind", ["usual", "sink", "diagonal"])
def test_weak_strengths(factor: Any, kind: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass for known weak strengths, by polynomials, from what this kernel saves."""
    strength = 0.2 if GPU else 0.05
    take_strengths_for_weak(monkeypatch)
    inputs = states(256, strength=strength, transposed=True)
    if kind in ("sink", "diagonal"):
        inputs = collapsed_inputs(inputs, 5.0, kind)
    refinement = Refinement(factor, strength)
    assert_within_budget(fused_operation(refinement, inputs, strength), inputs, refinement, frozen=True)
    assert "whole_map_forward" in launched


def test_a_sequence_of_padding_gives_zeros() -> None:
    assert_padding_gives_zeros(states(180, batch=2), Refinement("high", "learned"))


def test_padding_of_the_whole_first_half(launched: list[str]) -> None:
    """With scores so low that exponentials relative to 0 would vanish."""
    inputs = states(256, strength=0.5)
    mask = torch.ones(1, 256, dtype=torch.bool, device=DEVICE)
    mask[:, :140] = False
    inputs.query[..., 0], inputs.key[..., 0] = 32.0, -64.0
    inputs = replace(inputs, padding_mask=mask)
    refinement = Refinement("high", "learned")
    assert_within_budget(fused_operation(refinement, inputs), inputs, refinement)
    assert "whole_map_forward" in launched


def test_what_it_cannot_take_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    good, taken = torch.zeros(2, 2, 256, 64, dtype=DTYPE, device=DEVICE), Taken("long", "hopper")
    taken.assert_not_for_others(good)
    assert taken(good[:, :, :129])
    assert taken(good, receives=2)
    assert not taken(good[:, :, :128]), "short kernels do"
    monkeypatch.setattr(dispatch, "WHOLE_MIN_HEADS", 5)
    assert not taken(good), "too few heads"


def test_blocks_that_are_looked_at_together_do_not_matter(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of ``careful_output`` look at one, two or eight blocks of five heads; two underflow."""
    strong = 5.0 if GPU else 1.5
    inputs = states(256, heads=5, strength=(strong, 0.01, 0.01, strong, 0.01))
    inputs = collapsed_inputs(inputs, 70.0 if GPU else 12.0, "sink")
    found, lowest = [], torch.empty(0)
    for blocks in (1, 2, 8):
        monkeypatch.setattr("saobp.kernels.bidirectional.launch.CHECKED_BLOCKS", blocks)
        clear_plans()
        out, saved = forward(inputs)
        found.append((out, saved["inverse"]))
        lowest = saved["lowest"]
    below = spec_of(inputs.query, inputs.key, None, None, 256, 0.125, 0.0, 1.0, 1, 0.0).lowest_sum
    assert (lowest.view(5, 2) < below).any(1).tolist() == [True, False, False, True, False]
    assert launched.count("careful_output") == 3
    assert all(torch.equal(one, other) for way in found[1:] for one, other in zip(found[0], way, strict=True))


def test_sums_alone_take_the_sweeps(launched: list[str]) -> None:
    """Refined weights as an operator need row and key sums without an output."""
    inputs = states(256)
    spec = spec_of(inputs.query, inputs.key, None, None, 256, 0.125, 0.0, 1.0, 1, 0.0)
    run_sums(spec, inputs.query, inputs.key, inputs.strength)
    assert "whole_map_forward" not in launched

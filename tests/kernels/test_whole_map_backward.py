"""The backward pass of 129 to 256 tokens for Hopper: what the three sweeps give, and the specification.

Without such a GPU it runs on a CPU in float16, as ``hopper_calls`` has it.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from call_helpers import clear_plans, fused_operation, note_launches
from gluon_on_cpu import OnCpu
from hopper_calls import (
    DEVICE,
    DTYPE,
    GPU,
    STRENGTHS,
    WHOLE_MAP_CALLS,
    Taken,
    skip_other_gpus,
    states,
    take_strengths_for_weak,
    use_on_cpu,
)
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.kernels import dispatch
from saobp.kernels.call_spec import CallSpec
from saobp.kernels.fused import FAMILIES
from saobp.kernels.hopper import entry_gradients, whole_map_backward
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import AttentionInputs, collapsed_inputs

pytestmark = skip_other_gpus


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that plans were made for; Hopper's serves however few the heads are."""
    kernel = OnCpu(whole_map_backward.whole_map_backward, {})
    use_on_cpu(monkeypatch, whole_map_backward_kernel=kernel)
    monkeypatch.setattr(dispatch, "ANY_STRENGTH_DTYPE", DTYPE)
    monkeypatch.setattr(dispatch, "WHOLE_MIN_HEADS", 0 if GPU else 1 << 60)
    monkeypatch.setattr(dispatch, "WHOLE_BACKWARD_MIN_HEADS", 0)
    return note_launches(monkeypatch)


def gradients(inputs: AttentionInputs, receives: int = 1, bound: float = 0.0) -> tuple[Tensor, ...]:
    """Of queries, keys, values and, without a bound, strengths."""
    numbers = (inputs.query.shape[2], 0.125, 0.0, 1.0, receives, bound)
    *leaves, strength = inputs.leaves()
    out = FAMILIES["long"].forward(
        *leaves, strength.detach() if bound else strength, inputs.padding_mask, None,
        torch.tensor(7, device=DEVICE), *numbers,
    )[0]  # fmt: skip
    return torch.autograd.grad(out, leaves if bound else [*leaves, strength], inputs.output_gradient)


CALLS = WHOLE_MAP_CALLS | {
    "rows one after the other": ({"length": 256}, {}),
    "key bias, padding and tail": ({"length": 190, "padding": "left", "batch": 2}, {"receives": 2}),
    "weak": ({"length": 256, "strength": 0.05}, {"bound": 0.0487705755}),
    "weak key bias": ({"length": 200, "strength": 0.05}, {"bound": 0.0487705755, "receives": 2}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_gives_what_three_sweeps_give(
    name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, options = CALLS[name]
    if "bound" in options:
        take_strengths_for_weak(monkeypatch)
    inputs = states(**sizes)
    found = gradients(inputs, **options)
    assert "whole_map_backward" in launched
    clear_plans()
    monkeypatch.setattr(dispatch, "WHOLE_BACKWARD_MIN_HEADS", 1 << 60)
    expected = gradients(inputs, **options)
    assert launched.count("whole_map_backward") == 1
    for got, wanted in zip(found, expected, strict=True):
        times = 16 if got.ndim > 1 else 64  # a strength's gradient is what is left of sums over all rows
        largest = float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=0, atol=times * torch.finfo(DTYPE).eps * largest)
        assert got.stride() == wanted.stride()


@pytest.mark.parametrize("factor", ["high", "low", "high-key-bias"])
@pytest.mark.parametrize(
    ("kind", "gap"), [("usual", 0.0), ("padded", 0.0), *itertools.product(("sink", "diagonal"), (3.0, 10.0))]
)
def test_gradients_are_within_the_budget(factor: Any, kind: Any, gap: float, launched: list[str]) -> None:
    """Learned strengths, with their gradient; ``careful_gradients`` takes over where rows underflow.

    Keys' gradients of a sink are within the budget or beyond it by chance, as those of the three sweeps are.
    """
    strengths = (-0.7, 1.5) if factor == "low" else STRENGTHS
    padded = {"length": 200, "padding": "left"} if kind == "padded" else {"length": 256}
    inputs = states(**padded, strength=strengths, seed=2)
    if gap:
        inputs = collapsed_inputs(inputs, 4 * gap if GPU else gap, kind)
    refinement = Refinement(factor, "learned")
    assert_within_budget(fused_operation(refinement, inputs), inputs, refinement)
    assert {"whole_map_backward", "careful_gradients"} <= set(launched)
    assert "value_gradient" not in launched


@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
@pytest.mark.parametrize("kind", ["usual", "sink", "diagonal"])
def test_weak_strengths(factor: Any, kind: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Known weak strengths, whose normalisers the forward pass stores but for a factor."""
    strength = 0.2 if GPU else 0.05
    take_strengths_for_weak(monkeypatch)
    inputs = states(256, strength=strength, transposed=True, seed=1)
    if kind in ("sink", "diagonal"):
        inputs = collapsed_inputs(inputs, 5.0, kind)
    refinement = Refinement(factor, strength)
    assert_within_budget(fused_operation(refinement, inputs, strength), inputs, refinement, frozen=True)
    assert "whole_map_backward" in launched


@pytest.mark.parametrize("name", ["plain", "padding and tail", "shared key heads", "key bias"])
def test_heads_that_underflow_are_computed_again(
    name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads, whether they underflow or not, by the careful sweeps in one launch and in three."""
    monkeypatch.setattr(CallSpec, "lowest_sum", 1e9)
    sizes, options = CALLS[name]
    inputs = states(**sizes)
    found = gradients(inputs, **options)
    assert launched[-2:] == ["whole_map_backward", "careful_gradients"]
    clear_plans()
    monkeypatch.setattr(dispatch, "WHOLE_BACKWARD_MIN_HEADS", 1 << 60)
    expected = gradients(inputs, **options)
    for got, wanted in zip(found, expected, strict=True):
        largest = float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=0, atol=2 * torch.finfo(DTYPE).eps * largest)


def test_one_head_of_several_underflows(launched: list[str]) -> None:
    """Programs of ``careful_gradients`` look at two heads of five; two underflow."""
    strong = 5.0 if GPU else 1.5
    inputs = states(256, heads=5, strength=(strong, 0.01, 0.01, strong, 0.01))
    inputs = collapsed_inputs(inputs, 70.0 if GPU else 12.0, "sink")
    refinement = Refinement("high", "learned")
    assert_within_budget(fused_operation(refinement, inputs), inputs, refinement)
    assert "careful_gradients" in launched


def test_a_sequence_of_padding_gives_zeros() -> None:
    inputs = states(180, batch=2)
    mask = torch.ones(2, 180, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    leaves = inputs.leaves()
    out = fused_operation(Refinement("high", "learned"), replace(inputs, padding_mask=mask))(*leaves)
    found = torch.autograd.grad(out, leaves, inputs.output_gradient)
    assert all(torch.isfinite(one).all() for one in found)
    assert all((one[1] == 0).all() for one in found[:3])


def test_what_it_cannot_take_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    good, taken = torch.zeros(2, 2, 256, 64, dtype=DTYPE, device=DEVICE), Taken("long", "hopper_back")
    taken.assert_not_for_others(good)
    assert taken(good[:, :, :129])
    assert taken(good, receives=2)
    assert not taken(good, dropout=0.1)
    monkeypatch.setattr(dispatch, "WHOLE_BACKWARD_MIN_HEADS", 5)
    assert not taken(good), "too few heads"


def test_a_gradient_that_is_not_aligned_takes_the_sweeps(launched: list[str]) -> None:
    """Also after one that is."""
    inputs = states(256)
    query, key, value, strength = inputs.leaves()
    room = torch.zeros(inputs.query.numel() + 8, dtype=DTYPE, device=DEVICE)
    for start in (0, 1):
        out = saobp.attention(
            query, key, value, Refinement("high", "learned"), strength=strength, backend="fused"
        )
        torch.autograd.grad(out, query, room[start : out.numel() + start].view(out.shape))
        assert ("value_gradient" in launched) is (start == 1)
    assert launched.count("whole_map_backward") == 1


def executed(text: str, operands: list[Tensor]) -> list[Tensor]:
    """The outputs of assembly on numbers; ``operands`` are its inputs, which come after the outputs."""
    first = len(re.findall("=", entry_gradients._ENTRY_REGISTERS.value))
    numbers = {f"${first + place}": one for place, one in enumerate(operands)}
    numbers |= {"0f3F800000": torch.tensor(1.0)}
    operations = {
        "fma": torch.addcmul, "mul": torch.mul, "add": torch.add, "sub": torch.sub, "neg": torch.neg,
        "mov": torch.clone, "ex2": torch.exp2, "rcp": torch.reciprocal,
    }  # fmt: skip
    for line in text.strip("{} ").split(";")[1:-1]:
        name, rest = line.strip().split(" ", 1)
        target, *given = (one.strip() for one in rest.split(","))
        values = [numbers[one] for one in given]
        operation = operations[name.split(".")[0]]
        numbers[target] = operation(values[2], *values[:2]) if len(values) == 3 else operation(*values)
    return [numbers[f"${place}"] for place in range(first)]


@pytest.mark.parametrize("receives", [1, 2])
@pytest.mark.parametrize("shares", [True, False])
def test_the_assembly_of_entries(receives: int, shares: bool) -> None:
    """Eight entries, of two rows: 0, 1, 4 and 5 of one, 2, 3, 6 and 7 of the other."""
    torch.manual_seed(receives)
    row = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
    raw, d, weight, dc = torch.randn(8), torch.randn(8), torch.rand(8), torch.randn(8)
    high, gamma, delta = (torch.rand(2)[row] for _ in range(3))
    given = (raw, d, torch.full((8,), 0.2), -high, -gamma, delta, weight, dc)
    text = entry_gradients._entry_gradients(receives, shares).value
    found = executed(text, [number for one in given for number in one])
    a = torch.exp2(0.2 * raw - high)
    u = a / (1 - gamma * a)
    p = weight * (a if receives == 2 else u)
    d_logits = p * (d - delta)
    d_message = -u * dc if receives == 2 else u * (d_logits - dc)
    torch.testing.assert_close(torch.stack(found[:8]), a)
    torch.testing.assert_close(torch.stack(found[8:16]), d_logits + gamma * d_message, rtol=1e-4, atol=1e-5)
    sums = torch.stack(found[16:]).view(2, 2, 2)  # eights of columns, rows, even and odd columns
    for one in range(2):
        wanted = [part[row == one].sum() for part in (d_message, d_logits, a * p, a * a)]
        got = [*sums[0, one], *sums[1, one]] if shares else [*sums[:, one].sum(0)]
        torch.testing.assert_close(torch.stack(got), torch.stack(wanted[: len(got)]), rtol=1e-4, atol=1e-5)

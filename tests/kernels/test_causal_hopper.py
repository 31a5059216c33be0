"""The strict causal kernel for Hopper: what the sweeps give, and the specification.

Without such a GPU it runs on a CPU in float16, as ``hopper_calls`` has it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from call_helpers import clear_plans, forward_and_saved, fused_operation, note_launches
from gluon_on_cpu import OnCpu
from hopper_calls import CALLS as HOPPER_CALLS
from hopper_calls import (
    DEVICE,
    DTYPE,
    GPU,
    Taken,
    assert_padding_gives_zeros,
    skip_other_gpus,
    take_strengths_for_weak,
    use_on_cpu,
)
from hopper_calls import states as hopper_states

from saobp import Refinement
from saobp.kernels import dispatch
from saobp.kernels.causal.launch import saved_slices
from saobp.kernels.hopper import causal_forward, causal_tiles, short_forward, whole_map
from saobp.kernels.hopper import launch as hopper_launch
from saobp.kernels.library.packed_bf16 import half_log2
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import collapsed_inputs

pytestmark = skip_other_gpus


def _both(messages: Any) -> tuple[Any, Any]:
    return messages.to(tl.float16), messages


KERNEL = "causal_hopper_forward"
ASSEMBLY = {
    short_forward.WRITTEN.value: lambda lowest: lowest,
    whole_map.POWERS_F16.value: lambda raw, scale, minus: tl.exp2(raw * scale + minus).to(tl.float16),
    causal_tiles.MESSAGES.value: lambda x, slope: _both(tl.log2(1.0 + slope * tl.exp2(x))),
    causal_tiles.WEAK_MESSAGES.value: lambda x, slope, bend: half_log2(
        tl.exp2(x).to(tl.float16), (None, slope, bend)
    ),
    causal_tiles.NOT_LATER.value: lambda raw, keys, rows: tl.where(keys > rows, float("-inf"), raw),
    causal_tiles.WEIGHTS_F16.value: lambda x: tl.exp2(x).to(tl.float16),
}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that plans were made for; the one for Hopper serves however few the heads are."""
    use_on_cpu(monkeypatch, causal_kernel=OnCpu(causal_forward.causal_hopper_forward, ASSEMBLY))
    monkeypatch.setattr(dispatch, "CAUSAL_MIN_HEADS", 0)
    monkeypatch.setattr(dispatch, "CAUSAL_MIN_ENTRIES", 0)
    return note_launches(monkeypatch)


states = partial(hopper_states, strength=(0.3, 1.5))
forward = partial(forward_and_saved, "causal", saved_slices)


CALLS = HOPPER_CALLS | {
    "three blocks of three heads": ({"length": 384, "heads": 3, "strength": (0.0, 0.5, 1.0)}, {}),
    "dropout": ({"length": 256}, {"dropout": 0.3}),
    "messages that raise beliefs": ({"length": 200}, {"sign": -1.0}),
    "strengths of both signs": ({"length": 200, "strength": (-0.7, 0.5)}, {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_gives_what_three_sweeps_give(
    name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, options = CALLS[name]
    inputs = states(**sizes)
    found, saved = forward(inputs, **options)
    clear_plans()
    monkeypatch.setattr(dispatch, "CAUSAL_MIN_HEADS", 1 << 60)
    expected, wanted = forward(inputs, **options)
    assert launched[0] == KERNEL
    assert launched.count("causal_output") == 1
    eps = torch.finfo(DTYPE).eps
    torch.testing.assert_close(found, expected, rtol=4 * eps, atol=4 * eps)
    for part in ("lse", "message_sums", "belief"):
        torch.testing.assert_close(saved[part], wanted[part], rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("tokens", [0, 1024])
def test_rows_of_a_block_do_not_matter(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls by the blocks of longer ones, or all by those of shorter ones."""
    inputs = states(330, heads=3, strength=(0.1, 0.5, 1.0))
    expected, _ = forward(inputs)
    clear_plans()
    monkeypatch.setattr(hopper_launch, "CAUSAL_SMALL", tokens)
    found, _ = forward(inputs)
    eps = torch.finfo(DTYPE).eps
    torch.testing.assert_close(found, expected, rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize("factor", ["high", "low"])
@pytest.mark.parametrize("kind", ["usual", "padded", "sink", "diagonal", "filled sink"])
def test_output_and_gradients_are_within_the_budget(factor: Any, kind: Any, launched: list[str]) -> None:
    """Learned strengths, with their gradient; heads with rows that underflow are computed twice."""
    padded = {"length": 200, "padding": "left"} if kind == "padded" else {"length": 256}
    inputs = states(**padded, strength=(-0.7, 1.5))
    if kind in ("sink", "diagonal"):
        inputs = collapsed_inputs(inputs, 40.0 if GPU else 12.0, kind)
    if kind == "filled sink":  # by attraction: D needs what rounding the output left
        inputs = collapsed_inputs(inputs, 3.0)
    refinement = Refinement(factor, "learned")
    assert_within_budget(
        fused_operation(refinement, inputs, is_causal=True), inputs, refinement, is_causal=True
    )
    assert launched.count(KERNEL) == 1
    assert "causal_output" not in launched


@pytest.mark.parametrize("kind", ["usual", "sink", "diagonal"])
def test_weak_strengths(kind: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass for known weak strengths, by polynomials, from what this kernel saves."""
    strength = 0.2 if GPU else 0.05
    take_strengths_for_weak(monkeypatch)
    inputs = states(256, strength=strength, transposed=True)
    if kind in ("sink", "diagonal"):
        inputs = collapsed_inputs(inputs, 5.0, kind)
    refinement = Refinement("high", strength)
    assert_within_budget(
        fused_operation(refinement, inputs, strength, is_causal=True),
        inputs,
        refinement,
        is_causal=True,
        frozen=True,
    )
    assert KERNEL in launched


@pytest.mark.parametrize(("kind", "tokens"), [("sink", 512), ("diagonal", 512), ("sink", 0)])
def test_heads_with_rows_that_underflow(kind: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs compute these again, also in blocks of longer calls, with two smallest normalisers."""
    monkeypatch.setattr(hopper_launch, "CAUSAL_SMALL", tokens)
    strong = 5.0 if GPU else 1.5
    inputs = states(200, heads=5, strength=(strong, 0.01, 0.01, strong, -0.3))
    inputs = collapsed_inputs(inputs, 90.0 if GPU else 12.0, kind)
    found, saved = forward(inputs)
    clear_plans()
    monkeypatch.setattr(dispatch, "CAUSAL_MIN_HEADS", 1 << 60)
    expected, wanted = forward(inputs)
    eps = torch.finfo(DTYPE).eps
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, expected, rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(saved["belief"], wanted["belief"], rtol=4 * eps, atol=4 * eps)


def test_a_sequence_of_padding_gives_zeros() -> None:
    assert_padding_gives_zeros(states(180, batch=2), Refinement("high", "learned"), is_causal=True)


def test_what_it_cannot_take_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    good, taken = torch.zeros(2, 2, 1024, 64, dtype=DTYPE, device=DEVICE), Taken("causal", "hopper")
    taken.assert_not_for_others(good)
    assert taken(good[:, :, :129])
    assert taken(good.to(torch.float16))
    assert not taken(good[:, :, :128]), "short kernels do"
    monkeypatch.setattr(dispatch, "CAUSAL_MIN_HEADS", 5)
    assert not taken(good), "too few heads"
    monkeypatch.setattr(dispatch, "CAUSAL_MIN_HEADS", 0)
    monkeypatch.setattr(dispatch, "CAUSAL_MIN_ENTRIES", 1 << 30)
    assert not taken(good), "too little work"

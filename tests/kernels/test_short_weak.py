"""The kernel of short sequences and weak known strengths, against the specification and the general kernel.

It belongs to bfloat16, which the interpreter has not. Without a GPU float16 goes its way, and weaker: the
parabolas are for fewer digits.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from call_helpers import clear_plans, fused_operation, note_launches
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.kernels.bidirectional import short_launch
from saobp.kernels.call_spec import Block, CallSpec
from saobp.kernels.calls import KernelChoice
from saobp.kernels.fused import FAMILIES
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs

short_refined_attention = FAMILIES["short"].forward

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, STRENGTH = (torch.bfloat16, 0.2) if GPU else (torch.float16, 0.05)
BLOCKS = [
    Block(64, 128, stages=1, registers=128),
    Block(64, 128, stages=1, registers=168),
    Block(128, 128, warps=8, stages=1),
]


@pytest.fixture(autouse=True)
def _weak_way(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(CallSpec, "precise", 0)
        monkeypatch.setattr(CallSpec, "may_underflow", False)


def check(inputs: AttentionInputs, factor: str = "high") -> None:
    refinement = Refinement(factor, STRENGTH)
    assert_within_budget(fused_operation(refinement, inputs, STRENGTH), inputs, refinement, frozen=True)


def states(length: int, **options: Any) -> AttentionInputs:
    options = {"strength": STRENGTH, "dtype": DTYPE, "device": DEVICE, "seed": length} | options
    return attention_inputs(options.pop("batch", 1), 2, length, options.pop("dim", 16), **options)


@pytest.mark.parametrize("length", [1, 7, 37, 64, 65, 111, 128])
def test_every_length(length: int) -> None:
    check(states(length, transposed=True))


@pytest.mark.parametrize("factor", ["low", "high-listing", "low-listing"])
@pytest.mark.parametrize("length", [50, 100])
def test_every_factor(factor: str, length: int) -> None:
    check(states(length), factor)


@pytest.mark.parametrize("padding", ["left", "right", "both"])
@pytest.mark.parametrize("length", [64, 90, 128])
def test_padding_and_shared_key_heads(length: int, padding: Any) -> None:
    check(states(length, key_heads=1, padding=padding))


@pytest.mark.parametrize(("length", "dim"), [(70, 1), (70, 24), (70, 64), (40, 80), (70, 80), (70, 128)])
def test_head_sizes(length: int, dim: int) -> None:
    check(states(length, dim=dim))


@pytest.mark.parametrize("gap", [2.0, 5.0, 12.0] + ([90.0] if GPU else []))
@pytest.mark.parametrize("kind", ["sink", "diagonal"])
def test_collapsed_heads(kind: Any, gap: float) -> None:
    check(collapsed_inputs(states(100, dim=32), gap, kind))


def test_a_head_of_strength_zero() -> None:
    check(states(128, strength=(0.0, STRENGTH)))


def test_a_sequence_of_padding_gives_zeros_and_no_gradient() -> None:
    inputs = states(80, batch=2)
    mask = torch.ones(2, 80, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    query, key, value, _ = inputs.leaves()
    refinement = Refinement("high", STRENGTH)
    out = saobp.attention(query, key, value, refinement, padding_mask=mask, backend="fused")
    out.sum().backward()
    assert (out[1] == 0).all()
    for leaf in (query, key, value):
        assert leaf.grad is not None
        assert (leaf.grad[1] == 0).all()
        assert torch.isfinite(leaf.grad).all()


def forward(inputs: AttentionInputs, **options: Any) -> tuple[Tensor, ...]:
    """Output, lse and key_part; ``cu`` makes the only batch a pack of sequences."""
    gamma = -math.expm1(-STRENGTH)
    seed = torch.tensor(7, device=DEVICE)
    numbers = (
        options.get("longest", inputs.query.shape[2]),
        0.25,
        options.get("dropout", 0.0),
        1.0,
        options.get("receives", True),
    )
    return short_refined_attention(
        inputs.query, inputs.key, inputs.value, inputs.strength, inputs.padding_mask, options.get("cu"), seed,
        *numbers, gamma,
    )[:3]  # fmt: skip


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"length": 128}, {}),
    "few tokens": ({"length": 40}, {}),
    "tail": ({"length": 111}, {}),
    "dropout": ({"length": 100}, {"dropout": 0.3}),
    "padding": ({"length": 128, "padding": "both", "batch": 2}, {"dropout": 0.2}),
    "listing": ({"length": 128}, {"receives": False}),
    "packed": ({"length": 285}, {"cu": (0, 1, 8, 8, 45, 109, 174, 285), "longest": 111}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_it_gives_what_the_general_kernel_gives(
    name: str, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows are dropped, and the backward pass gets the same: log-sum-exp and factors of keys."""
    sizes, options = CALLS[name]
    inputs = states(**sizes)
    if "cu" in options:
        options = options | {"cu": torch.tensor(options["cu"], dtype=torch.int32, device=DEVICE)}
    launched = note_launches(monkeypatch)
    monkeypatch.setitem(short_launch.WEAK_BLOCKS, (128, 64), block)
    found = forward(inputs, **options)
    clear_plans()
    monkeypatch.setattr(short_launch, "kernels_for", lambda *_: KernelChoice())
    expected = forward(inputs, **options)
    assert launched == ["short_weak_forward", "short_forward"]
    step = torch.finfo(DTYPE).eps
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=4 * step, atol=2 * step)

"""Long calls whose halves run side by side give, number by number, what they give whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from call_helpers import clear_plans
from torch import Tensor

from saobp import Refinement, attention
from saobp.testing.error_budget import run
from saobp.testing.inputs import AttentionInputs, attention_inputs

pytest.importorskip("triton")

from saobp.kernels import dispatch
from saobp.kernels.call_spec import CallSpec
from saobp.kernels.dispatch import select_kernels
from saobp.kernels.fused import FAMILIES
from saobp.kernels.runtime import launcher

refined_attention = FAMILIES["long"].forward

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LENGTH, DIM = (1024, 64) if GPU else (128, 16)
WEAK = -math.expm1(-0.2)
HALF = torch.bfloat16 if GPU else torch.float16
"""The interpreter knows no bfloat16."""


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Has every call cut in two, or none; what was planned before is forgotten."""

    def set_cut(wanted: bool) -> None:
        monkeypatch.setattr(dispatch, "SPLIT_MIN_ENTRIES", 0 if wanted else 1 << 62)
        clear_plans()

    return set_cut


def everything(inputs: AttentionInputs, bound: float) -> list[Tensor]:
    """Output, what is kept for the backward pass, and all gradients."""
    length, dim = inputs.query.shape[2:]
    leaves = [one.clone().requires_grad_() for one in (inputs.query, inputs.key, inputs.value)]
    strength = inputs.strength.clone().requires_grad_(not bound)
    numbers = (length, dim**-0.5, 0.0, 1.0, 1, bound)
    out, saved = refined_attention(*leaves, strength, inputs.padding_mask, None, None, *numbers)
    learned = leaves if bound else [*leaves, strength]
    return [out.detach(), saved, *torch.autograd.grad(out, learned, inputs.output_gradient)]


BATCH = {"batch": 2, "heads": 8, "padding": "right"}
HEADS = {"batch": 1, "heads": 8, "key_heads": 2, "transposed": True}


def check_equal(shape: dict[str, Any], bound: float, cut: Callable[[bool], None]) -> None:
    inputs = attention_inputs(length=LENGTH, dim=DIM, dtype=HALF, device=DEVICE, **shape)
    cut(False)
    whole = everything(inputs, bound)
    cut(True)
    for _ in range(3 if GPU else 1):  # the first call compiles, the second launches side by side
        found = everything(inputs, bound)
        for one, other in zip(found, whole, strict=True):
            assert are_same(one, other)
    plans = FAMILIES["long"].plans
    assert len(plans) == 2
    assert all(launches._offsets for launches, *_ in plans.values())


@pytest.mark.parametrize("shape", [BATCH, HEADS], ids=["padded batch", "heads in groups"])
@pytest.mark.usefixtures("weak_way")
def test_weak_strengths(shape: dict[str, Any], cut: Callable[[bool], None]) -> None:
    check_equal(shape, WEAK, cut)


@pytest.mark.parametrize("shape", [BATCH, HEADS], ids=["padded batch", "heads in groups"])
def test_learned_strengths(shape: dict[str, Any], cut: Callable[[bool], None]) -> None:
    check_equal(shape, 0.0, cut)


@pytest.mark.parametrize("batch", [1, 2])
def test_key_bias_with_messages_from_a_part_of_the_rows(batch: int, cut: Callable[[bool], None]) -> None:
    length = max(LENGTH, 192)
    inputs = attention_inputs(batch, 8, length, DIM, key_heads=2, strength=0.9, dtype=HALF, device=DEVICE)
    refinement = Refinement("high-key-bias", "learned", message_stride=4)

    def attend(*leaves: Tensor) -> Tensor:
        return attention(*leaves[:3], refinement, strength=leaves[3], backend="fused")

    found = []
    for wanted in (False, *([True] * (3 if GPU else 1))):
        cut(wanted)
        found.append((run(attend, inputs), attend(*inputs.leaves()[:3], inputs.strength).detach()))
        assert all(bool(one._offsets) == wanted for one, *_ in FAMILIES["key bias"].plans.values())
    (whole, alone), *others = found
    for gradients, output in others:
        assert are_same(output, alone)
        assert all(are_same(gradients[name], one) for name, one in whole.items())


def are_same(one: Tensor, other: Tensor) -> bool:
    """Byte by byte, so also where both are not a number."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def spec(**changed: Any) -> CallSpec:
    usual = CallSpec(
        batch=8, sequences=8, heads=16, group=1, length=2048, longest=2048, dim=64, dtype=torch.bfloat16,
        scale=0.125, dropout=0.0, sign=1.0, receives=1, bound=WEAK, masked=False, packed=False,
    )  # fmt: skip
    return replace(usual, **changed)


def split(spec: CallSpec) -> int | None:
    return select_kernels("long", spec).split_axis


def test_which_calls_are_cut() -> None:
    assert split(spec()) == 0
    assert split(spec(batch=1, sequences=1, length=8192)) == 1
    assert split(spec(batch=1, sequences=1, length=8192, group=8)) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"length": 1024},
        {"dropout": 0.1},
        {"dtype": torch.float32},
        {"batch": 1, "packed": True, "length": 16384},
        {"batch": 3, "sequences": 3, "length": 8192},
        {"batch": 1, "sequences": 1, "length": 8192, "group": 16},
    ],
    ids=["few entries", "dropout", "float32", "packed", "odd batch", "one key head"],
)
def test_which_calls_are_left_whole(changed: dict[str, Any]) -> None:
    assert split(spec(**changed)) is None


class Told:
    """A stream that notes for whom it waits."""

    def __init__(self, number: int, waits: list[tuple[int, int]]) -> None:
        self.cuda_stream, self._waits = number, waits

    def wait_stream(self, other: Told) -> None:
        self._waits.append((self.cuda_stream, other.cuda_stream))


def test_a_launch_that_fails_leaves_no_stream_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers go back to the present stream's allocator while the side stream may still fill them."""
    waits: list[tuple[int, int]] = []
    present, side = Told(1, waits), Told(2, waits)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: present)
    monkeypatch.setattr(launcher, "side_stream", lambda *_: side)
    halves_begun = launcher.fork_stream(torch.device("cuda", 0), 1)
    assert halves_begun.__enter__() == 2
    assert not halves_begun.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert waits == [(2, 1), (1, 2)]


@pytest.mark.skipif(not GPU, reason="needs a GPU: streams")
def test_inside_a_recorded_graph_and_on_another_stream(cut: Callable[[bool], None]) -> None:
    inputs = attention_inputs(4, 8, 1024, 64, dtype=torch.bfloat16, device=DEVICE)
    cut(False)
    whole = everything(inputs, WEAK)
    cut(True)
    everything(inputs, WEAK)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = everything(inputs, WEAK)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = everything(inputs, WEAK)
    graph.replay()
    torch.cuda.synchronize()
    for one, other, third in zip(whole, found, recorded, strict=True):
        assert are_same(one, other)
        assert are_same(one, third)

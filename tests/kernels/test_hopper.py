"""The kernel of short sequences for Hopper: what ``short_weak_forward`` gives, and the specification.

Without such a GPU it runs on a CPU in float16, as the other kernels do, by a stand-in for Gluon's operations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl
from call_helpers import clear_plans, fused_operation, note_launches, spec_of
from gluon_on_cpu import Barrier, OnCpu
from hopper_calls import (
    DEVICE,
    DTYPE,
    GPU,
    assert_padding_gives_zeros,
    skip_other_gpus,
    take_strengths_for_weak,
    use_on_cpu,
)
from hopper_calls import states as hopper_states
from torch import Tensor
from triton.runtime.jit import JITFunction

import saobp
from saobp import Refinement
from saobp.kernels import dispatch
from saobp.kernels.bidirectional import short
from saobp.kernels.call_spec import CallSpec
from saobp.kernels.dispatch import select_kernels
from saobp.kernels.fused import FAMILIES
from saobp.kernels.hopper import launch as hopper_launch
from saobp.kernels.hopper import short_backward as short_hopper_gradients
from saobp.kernels.hopper import short_forward as short_hopper
from saobp.kernels.library.packed_bf16 import boosted
from saobp.kernels.runtime.launcher import is_aligned
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import AttentionInputs, collapsed_inputs

short_refined_attention = FAMILIES["short"].forward

STRENGTH = 0.2 if GPU else 0.05

pytestmark = skip_other_gpus


def powers(raw: Any, score_scale: Any, minus_high: Any) -> Any:
    e = tl.exp2(raw * score_scale + minus_high).to(tl.float16)
    return e, e


ASSEMBLY = {
    short_hopper.FINE_POWERS.value: powers,
    short_hopper.WRITTEN.value: lambda x: x,
    short_hopper.POLYNOMIAL.value: lambda e, slope, bend: boosted(e, (bend, slope, bend)),
}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that plans were made for; the one for Hopper serves however few the heads are."""
    kernel = OnCpu(short_hopper.short_hopper_forward, ASSEMBLY)
    backward = OnCpu(short_hopper_gradients.short_hopper_backward, {})
    use_on_cpu(monkeypatch, hopper_kernel=kernel, hopper_backward_kernel=backward)
    take_strengths_for_weak(monkeypatch)
    monkeypatch.setattr(dispatch, "HOPPER_MIN_HEADS", 0)
    monkeypatch.setattr(hopper_launch, "HEADS_EACH", 2)
    clear_plans()
    yield note_launches(monkeypatch)
    clear_plans()


states = partial(hopper_states, strength=STRENGTH)


def forward(inputs: AttentionInputs, dropout: float = 0.0, receives: int = 1) -> tuple[Tensor, ...]:
    """Output, lse and key_part."""
    numbers = (inputs.query.shape[2], 0.125, dropout, 1.0, receives, -math.expm1(-STRENGTH))
    return short_refined_attention(
        inputs.query, inputs.key, inputs.value, inputs.strength, inputs.padding_mask, None,
        torch.tensor(7, device=DEVICE), *numbers,
    )[:3]  # fmt: skip


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"length": 128, "transposed": True}, {}),
    "rows one after the other": ({"length": 128}, {}),
    "an uneven number of heads": ({"length": 128, "heads": 5}, {}),
    "tail": ({"length": 111, "transposed": True}, {}),
    "few tokens": ({"length": 65}, {}),
    "padding": ({"length": 128, "padding": "both", "batch": 2}, {}),
    "padding and tail": ({"length": 90, "padding": "left", "batch": 2}, {}),
    "shared key heads": ({"length": 128, "heads": 4, "key_heads": 2}, {}),
    "strengths": ({"length": 128, "strength": (0.0, STRENGTH)}, {}),
    "dropout": ({"length": 128}, {"dropout": 0.3}),
    "listing": ({"length": 128}, {"receives": 0}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_gives_what_short_weak_gives(
    name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, options = CALLS[name]
    inputs = states(**sizes)
    found = forward(inputs, **options)
    clear_plans()
    monkeypatch.setattr(dispatch, "HOPPER_MIN_HEADS", 1 << 60)
    expected = forward(inputs, **options)
    assert launched == ["short_hopper_forward", "short_weak_forward"]
    # Sums over rows may come in another order, which factors of keys show in their last digits.
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2 * torch.finfo(DTYPE).eps)
    assert (found[0] == expected[0]).float().mean() > 0.99
    for got, wanted in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("factor", ["high", "low", "high-listing"])
@pytest.mark.parametrize("kind", ["usual", "padded", "sink", "diagonal"])
def test_output_and_gradients_are_within_the_budget(factor: str, kind: Any, launched: list[str]) -> None:
    inputs = states(100, padding="both") if kind == "padded" else states(128, transposed=True)
    if kind in ("sink", "diagonal"):
        inputs = collapsed_inputs(inputs, 5.0, kind)
    refinement = Refinement(factor, STRENGTH)
    assert_within_budget(fused_operation(refinement, inputs, STRENGTH), inputs, refinement, frozen=True)
    assert "short_hopper_forward" in launched


@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
@pytest.mark.parametrize("kind", ["usual", "padded", "sink"])
def test_any_strength(factor: str, kind: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned strengths, with their gradient."""
    if not GPU:
        monkeypatch.setattr(CallSpec, "precise", 1)
        monkeypatch.setattr(CallSpec, "may_underflow", True)
        monkeypatch.setattr(dispatch, "ANY_STRENGTH_DTYPE", DTYPE)
    strong = 5.0 if GPU else 1.5  # float16 has less range
    inputs = states(
        100 if kind == "padded" else 128,
        strength=(-0.7, strong),
        padding="left" if kind == "padded" else None,
    )
    if kind == "sink":
        inputs = collapsed_inputs(inputs, 40.0 if GPU else 3.0, "sink")
    refinement = Refinement(factor, "learned")

    def fused(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return saobp.attention(
            query,
            key,
            value,
            refinement,
            padding_mask=inputs.padding_mask,
            strength=strength,
            backend="fused",
        )

    assert_within_budget(fused, inputs, refinement)
    assert {"short_hopper_forward", "short_hopper_backward", "short_careful_backward"} <= set(launched)


def every_head_underflows(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module's kernels take every head for one that underflows, and compile them again for it."""
    monkeypatch.setattr(module, "LOWEST", tl.constexpr(1e9))
    for kernel in vars(module).values():
        if GPU and isinstance(kernel, JITFunction):
            monkeypatch.setattr(kernel, "hash", None)
            monkeypatch.setattr(kernel, "used_global_vals", {})
            if hasattr(kernel, "create_binder"):
                monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))


@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
@pytest.mark.parametrize(
    "name", ["plain", "tail", "padding and tail", "an uneven number of heads", "shared key heads"]
)
def test_heads_computed_again_in_the_log_domain(
    name: str, factor: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads, whether they underflow or not."""
    every_head_underflows(short_hopper, monkeypatch)
    if not GPU:
        monkeypatch.setattr(CallSpec, "precise", 1)
        monkeypatch.setattr(CallSpec, "may_underflow", True)
        monkeypatch.setattr(dispatch, "ANY_STRENGTH_DTYPE", DTYPE)
    sizes = CALLS[name][0]
    inputs = states(**(sizes | {"strength": (0.7, 1.5, 0.01, 0.3, 1.0)[: sizes.get("heads", 2)]}))
    inputs = collapsed_inputs(inputs, 3.0, "sink")
    outputs = []
    for heads in (0, 1 << 60):
        monkeypatch.setattr(dispatch, "HOPPER_MIN_HEADS", heads)
        clear_plans()
        with torch.no_grad():
            outputs.append(
                saobp.attention(
                    inputs.query, inputs.key, inputs.value, Refinement(factor, "learned"),
                    strength=inputs.strength, padding_mask=inputs.padding_mask, backend="fused",
                )
            )  # fmt: skip
    assert launched == ["short_hopper_forward", "short_forward"]
    torch.testing.assert_close(*outputs, rtol=0, atol=4 * torch.finfo(DTYPE).eps)


GRADIENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"length": 128, "transposed": True}, {}),
    "rows one after the other": ({"length": 128}, {}),
    "an uneven number of heads": ({"length": 128, "heads": 5}, {}),
    "tail": ({"length": 111}, {}),
    "padding": ({"length": 128, "padding": "both", "batch": 2}, {}),
    "padding and tail": ({"length": 90, "padding": "left"}, {}),
    "shared key heads": ({"length": 128, "heads": 4, "key_heads": 2}, {}),
    "dropout": ({"length": 128}, {"dropout": 0.3}),
    "key bias": ({"length": 128, "heads": 3}, {"receives": 2}),
    "key bias from a part of the rows": ({"length": 100}, {"receives": 2, "stride": 3}),
    "key bias, padding": ({"length": 100, "padding": "left"}, {"receives": 2}),
    "weak": ({"length": 128}, {"bound": -math.expm1(-STRENGTH)}),
    "weak, padding and tail": ({"length": 90, "padding": "left"}, {"bound": -math.expm1(-STRENGTH)}),
    "listing": ({"length": 128}, {"receives": 0, "bound": -math.expm1(-STRENGTH)}),
}


def gradients(
    inputs: AttentionInputs, dropout: float = 0.0, receives: int = 1, stride: int = 1, bound: float = 0.0
) -> tuple[Tensor, ...]:
    """Of queries, keys, values and strengths."""
    numbers = (inputs.query.shape[2], 0.125, dropout, 1.0, receives, bound, 1, 0.0, stride)
    *states, strength = inputs.leaves()
    out = short_refined_attention(
        *states, strength.detach() if bound else strength, inputs.padding_mask, None,
        torch.tensor(7, device=DEVICE), *numbers,
    )[0]  # fmt: skip
    leaves = states if bound else [*states, strength]
    return torch.autograd.grad(out, leaves, inputs.output_gradient)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("again", [False, True], ids=["products", "logarithms"])
def test_gradients_are_those_of_the_general_kernel(
    name: str, again: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all heads are computed again in the log domain, as those are that underflow."""
    sizes, options = GRADIENTS[name]
    weak = "bound" in options
    if not GPU:
        monkeypatch.setattr(CallSpec, "precise", 0 if weak else 1)
        monkeypatch.setattr(CallSpec, "may_underflow", not weak)
        monkeypatch.setattr(dispatch, "ANY_STRENGTH_DTYPE", DTYPE)
    if again:
        every_head_underflows(short, monkeypatch)
    strengths = (0.7, 0.3, 1.2, 0.5, 0.1)[: sizes.get("heads", 2)]
    inputs = states(**sizes, strength=STRENGTH if weak else strengths)
    found = gradients(inputs, **options)
    assert "short_hopper_backward" in launched
    assert ("short_careful_backward" in launched) is not weak
    clear_plans()
    monkeypatch.setattr(dispatch, "HOPPER_MIN_HEADS", 1 << 60)
    expected = gradients(inputs, **options)
    assert launched.count("short_backward") == 1
    for got, wanted in zip(found, expected, strict=True):
        largest = wanted.abs().max()
        torch.testing.assert_close(got, wanted, rtol=0, atol=8 * torch.finfo(DTYPE).eps * float(largest))
        assert got.stride() == wanted.stride()


@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
@pytest.mark.parametrize("kind", ["sink", "diagonal"])
@pytest.mark.parametrize("gap", [3.0, 8.0])
def test_gradients_of_collapsed_heads(
    gap: float, kind: Any, factor: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not GPU:
        monkeypatch.setattr(CallSpec, "precise", 1)
        monkeypatch.setattr(CallSpec, "may_underflow", True)
        monkeypatch.setattr(dispatch, "ANY_STRENGTH_DTYPE", DTYPE)
    inputs = collapsed_inputs(states(128, strength=(0.2, 1.5)), gap, kind)
    refinement = Refinement(factor, "learned")

    def fused(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return saobp.attention(query, key, value, refinement, strength=strength, backend="fused")

    assert_within_budget(fused, inputs, refinement)
    assert "short_hopper_backward" in launched


@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
def test_gradients_where_the_square_of_an_inverse_normaliser_overflows(
    factor: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normalisers of about 2^-70, which the kernel still computes itself."""
    if not GPU:
        monkeypatch.setattr(CallSpec, "precise", 1)
        monkeypatch.setattr(CallSpec, "may_underflow", True)
        monkeypatch.setattr(dispatch, "ANY_STRENGTH_DTYPE", DTYPE)
    inputs = collapsed_inputs(states(128, strength=(0.38, 0.36)), 60.0, "sink")
    refinement = Refinement(factor, "learned")

    def fused(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return saobp.attention(query, key, value, refinement, strength=strength, backend="fused")

    assert_within_budget(fused, inputs, refinement)
    assert "short_hopper_backward" in launched


def test_a_sequence_of_padding_gives_zeros() -> None:
    assert_padding_gives_zeros(states(80, batch=2), Refinement("high", STRENGTH))


def test_what_it_cannot_take_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def serves(one: Tensor, cu: Tensor | None = None, capability: int = 90) -> bool:
        spec = spec_of(one, one, None, cu, min(one.shape[2], 128), 1.0, 0.0, 1.0, 1, 0.18)
        return select_kernels("short", spec, aligned=is_aligned(one), capability=capability).hopper

    good = torch.zeros(2, 2, 128, 64, dtype=DTYPE, device=DEVICE)
    assert serves(good)
    assert not serves(good[:, :, :64]), "a smaller tile would do"
    assert not serves(good.repeat(1, 1, 1, 2)), "another head size"
    assert not serves(good[..., :32])
    assert not serves(good.float())
    assert not serves(good[:1], torch.tensor([0, 100, 128], dtype=torch.int32, device=DEVICE)), "packed"
    assert not serves(good[:, :1].expand(2, 2, 128, 64)), "a head that stands for two"
    assert not serves(good.repeat(1, 1, 1, 2)[..., 4:68]), "rows that begin elsewhere than at 16 bytes"
    assert not serves(good, capability=100), "another GPU"
    monkeypatch.setattr(dispatch, "HOPPER_MIN_HEADS", 5)
    assert not serves(good), "too few heads"
    with dispatch.for_cuda_graph():
        assert not serves(good)
        monkeypatch.setattr(dispatch, "WHOLE_MIN_HEADS", 4)
        assert serves(good), "in a graph the host's time does not count"
    assert not serves(good)


def test_calls_for_a_graph_have_plans_of_their_own(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the backward pass too, which runs in a thread of its own."""
    monkeypatch.setattr(dispatch, "HOPPER_MIN_HEADS", 1 << 60)
    monkeypatch.setattr(dispatch, "WHOLE_MIN_HEADS", 0)
    inputs = states(128)
    bound = -math.expm1(-STRENGTH)
    launched_one_by_one = gradients(inputs, bound=bound)
    with dispatch.for_cuda_graph():
        found = gradients(inputs, bound=bound)
    assert launched == [
        "short_weak_forward",
        "short_backward",
        "short_hopper_forward",
        "short_hopper_backward",
    ]
    for got, wanted in zip(found, launched_one_by_one, strict=True):
        largest = float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=0, atol=8 * torch.finfo(DTYPE).eps * largest)


def test_an_address_that_is_not_aligned_goes_elsewhere(launched: list[str]) -> None:
    """Calls that look alike but for that have plans of their own."""
    inputs = states(128)
    forward(inputs)
    room = torch.empty(inputs.query.numel() + 8, dtype=DTYPE, device=DEVICE)
    moved = room[1 : inputs.query.numel() + 1].view(inputs.query.shape)
    moved.copy_(inputs.query)
    out = forward(replace(inputs, query=moved))[0]
    assert launched == ["short_hopper_forward", "short_weak_forward"]
    torch.testing.assert_close(out, forward(inputs)[0], rtol=0, atol=2 * torch.finfo(DTYPE).eps)


def test_a_gradient_whose_address_is_not_aligned_goes_elsewhere(launched: list[str]) -> None:
    inputs = states(128)
    expected = gradients(inputs, bound=-math.expm1(-STRENGTH))
    room = torch.empty(inputs.output_gradient.numel() + 8, dtype=DTYPE, device=DEVICE)
    moved = room[1 : inputs.output_gradient.numel() + 1].view(inputs.output_gradient.shape)
    moved.copy_(inputs.output_gradient)
    found = gradients(replace(inputs, output_gradient=moved), bound=-math.expm1(-STRENGTH))
    assert launched == ["short_hopper_forward", "short_hopper_backward", "short_backward"]
    for got, wanted in zip(found, expected, strict=True):
        largest = float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=0, atol=8 * torch.finfo(DTYPE).eps * largest)


def test_a_wait_for_nothing_is_noticed() -> None:
    """What the stand-in is for: a GPU would hang."""
    barrier = Barrier()
    with pytest.raises(RuntimeError, match="for ever"):
        barrier.wait(0)

"""Cached launch plans, their keys, and the contracts of the operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_helpers import spec_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import saobp
from saobp import Refinement
from saobp.arguments import BoundedStrength
from saobp.kernels.bidirectional import launch
from saobp.kernels.causal import launch as causal_launch
from saobp.kernels.fused import FAMILIES
from saobp.testing.inputs import attention_inputs

short_refined_attention = FAMILIES["short"].forward
short_refined_output = FAMILIES["short"].output

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HIGH = Refinement("high", 0.2)


def varied(dtype: torch.dtype = torch.float16) -> dict[str, dict[str, Any]]:
    """Calls that differ in one thing each, on values that are the same where they can be."""
    plain = attention_inputs(2, 2, 16, 16, dtype=dtype, device=DEVICE)
    states = {"query": plain.query, "key": plain.key, "value": plain.value}
    shifted = torch.empty(plain.query.numel() + 1, dtype=dtype, device=DEVICE)[1:]
    shifted = shifted.view(plain.query.shape).copy_(plain.query)
    strength = torch.tensor([0.1, 0.4], device=DEVICE)
    mask = torch.ones(2, 16, dtype=torch.bool, device=DEVICE)
    mask[0, 11:] = False
    return {
        "plain": states,
        "strides of queries": {**states, "query": plain.query.transpose(1, 2).contiguous().transpose(1, 2)},
        "strides of values": {**states, "value": plain.value.transpose(1, 2).contiguous().transpose(1, 2)},
        "alignment": {**states, "query": shifted},
        "shared keys": {**states, "key": plain.key[:, :1], "value": plain.value[:, :1]},
        "batch": {name: tensor[:1] for name, tensor in states.items()},
        "length": {name: tensor[:, :, :9] for name, tensor in states.items()},
        "head size": {name: tensor[..., :12] for name, tensor in states.items()},
        "strengths": {**states, "strength": BoundedStrength(strength, 0.4)},
        "strengths in half precision": {**states, "strength": strength.half()},
        "strengths of one entry": {**states, "strength": torch.tensor(0.3, device=DEVICE).expand(2)},
        "padding": {**states, "padding_mask": mask},
        "scale": {**states, "scale": 0.7},
        "factor": {**states, "refinement": Refinement("low", 0.2)},
        "listing": {**states, "refinement": Refinement("high-listing", 0.2)},
    }


def call(options: dict[str, Any], backend: str) -> Tensor:
    return saobp.attention(**{"refinement": HIGH, **options}, backend=backend)


@pytest.mark.parametrize("is_causal", [False, True], ids=["short", "short causal"])
@pytest.mark.parametrize("name", [name for name in varied() if name != "plain"])
def test_calls_in_turn_do_not_get_each_others_plan(name: str, is_causal: bool) -> None:
    calls = varied()
    for options in (calls["plain"], calls[name], calls["plain"], calls[name]):
        options = {**options, "is_causal": is_causal}
        with torch.no_grad():
            found, expected = call(options, "fused"), call(options, "reference")
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def learned(options: dict[str, Any], backend: str, laid_out: str = "rows first") -> list[Tensor]:
    """Output and gradients, for a gradient of the output in one layout or another."""
    leaves = [options[name].detach().requires_grad_() for name in ("query", "key", "value")]
    out = call({**options, **dict(zip(("query", "key", "value"), leaves, strict=True))}, backend)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    if laid_out == "heads first":
        grad = grad.contiguous()
    elif laid_out == "rows first":
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        grad = grad.mT.contiguous().mT
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["long", "causal"])
@pytest.mark.parametrize("name", [name for name in varied() if name != "plain"])
def test_plans_of_several_sweeps_are_for_their_calls_alone(name: str, is_causal: bool) -> None:
    """In float32 sequences of any length go the way of long ones."""
    calls = varied(torch.float32)
    for options in (calls["plain"], calls[name], calls["plain"], calls[name]):
        options = {**options, "is_causal": is_causal}
        for found, expected in zip(learned(options, "fused"), learned(options, "reference"), strict=True):
            torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("way", ["long", "causal", "elemmul"])
def test_plans_are_for_one_layout_of_gradients(way: str) -> None:
    options = {**varied(torch.float32)["plain"], "is_causal": way == "causal"}
    if way == "elemmul":
        options["refinement"] = Refinement("elemmul")
    expected = learned(options, "reference")
    for laid_out in ("heads first", "rows first", "columns first", "heads first"):
        for found, right in zip(learned(options, "fused", laid_out), expected, strict=True):
            torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True], ids=["long", "causal"])
def test_plans_of_several_sweeps_are_made_once(is_causal: bool) -> None:
    options = {**varied(torch.float32)["plain"], "is_causal": is_causal}
    plans = FAMILIES["causal" if is_causal else "long"].plans
    made = []
    for _ in range(3):
        learned(options, "fused")
        made.append(list(plans.values()))
    assert len(made[0]) == 2  # forward and backward
    assert all(one is other for later in made[1:] for one, other in zip(made[0], later, strict=True))
    learned(options, "fused", "heads first")
    assert len(plans) == 3


def test_plans_are_shared_by_calls_that_look_alike() -> None:
    plans = FAMILIES["short"].plans
    calls = varied()
    for _ in range(2):
        for options in calls.values():
            call(options, "fused")
    assert len(plans) == len(calls)  # alignment too: what is not aligned TMA cannot fetch
    query, key, value = (calls["plain"][name].requires_grad_() for name in ("query", "key", "value"))
    for _ in range(2):
        call({"query": query, "key": key, "value": value}, "fused").sum().backward()
    assert len(plans) == len(calls) + 2  # forward that saves, and backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pieces", [launch.saved_slices, causal_launch.saved_slices], ids=["long", "causal"])
def test_what_is_saved_has_no_gaps(pieces: Any, dtype: torch.dtype) -> None:
    """The compiler's checks compare what an operator gives byte by byte; nobody writes to a gap."""
    query = torch.empty(1, 3, 131, 5, dtype=dtype)
    for bound in (0.0, 0.18):
        problem = spec_of(query, query, None, None, 131, 1.0, 0.0, 1.0, 1, bound)
        places, size = pieces(problem)
        assert size == sum(math.prod(piece.shape) * piece.dtype.itemsize for piece in places.values())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("strength", [0.2, 8.0])
def test_inference_gives_the_bits_of_training(strength: float, is_causal: bool, padded: bool) -> None:
    inputs = attention_inputs(
        2, 2, 20, 16, padding="right" if padded else None, dtype=torch.float16, device=DEVICE
    )
    query, key, value, _ = inputs.leaves()
    call = lambda: saobp.attention(  # noqa: E731
        query, key, value, Refinement("high", strength), is_causal=is_causal,
        padding_mask=inputs.padding_mask, backend="fused",
    )  # fmt: skip
    trained = call()
    with torch.no_grad():
        inferred = call()
    assert trained.requires_grad
    assert not inferred.requires_grad
    assert torch.equal(trained, inferred)


def arguments(learning: bool) -> tuple[Any, ...]:
    inputs = attention_inputs(1, 2, 20, 16, dtype=torch.float16, device=DEVICE)
    states = inputs.leaves() if learning else [leaf.detach() for leaf in inputs.leaves()]
    return (*states, None, None, None, 20, 0.25, 0.0, 1.0, 1, 0.0)


def test_the_operator_of_inference_is_well_formed_and_refuses_to_learn() -> None:
    kinds = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(short_refined_output, arguments(learning=False), test_utils=kinds)
    with pytest.raises(RuntimeError, match="short_refined_output has no gradient"):
        short_refined_output(*arguments(learning=True))


def test_only_the_output_learns() -> None:
    out, *saved = short_refined_attention(*arguments(learning=True))
    assert out.requires_grad
    assert not any(tensor.requires_grad for tensor in saved)


def test_gradients_cannot_be_differentiated_again() -> None:
    query, key, value, *_ = arguments(learning=True)
    out = saobp.attention(query, key, value, HIGH, backend="fused")
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    again = out.detach().sum() + gradient.sum() + query.sum()
    with pytest.raises(RuntimeError, match="no second derivatives: use backend='reference'"):
        torch.autograd.grad(again, query)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"sliding_window": 5}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_give_the_same_gradients(options: dict[str, Any], reentrant: bool) -> None:
    query, key, value, *_ = arguments(learning=True)
    call = lambda *states: saobp.attention(*states, HIGH, backend="fused", **options)  # noqa: E731
    found = []
    for out in (call(query, key, value), checkpoint(call, query, key, value, use_reentrant=reentrant)):
        query.grad = key.grad = value.grad = None
        out.float().square().sum().backward()
        found.append([query.grad, key.grad, value.grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("learning", [False, True])
def test_forward_mode_derivatives_are_refused(learning: bool) -> None:
    """PyTorch would call them 0."""
    query, key, value, *_ = arguments(learning)
    call = lambda query: saobp.attention(query, key, value, HIGH, backend="fused")  # noqa: E731
    with pytest.raises(RuntimeError, match="no forward-mode derivatives: use backend='reference'"):
        torch.func.jvp(call, (query.detach(),), (torch.ones_like(query),))
    with torch.autograd.forward_ad.dual_level():
        assert call(query.detach()).shape == query.shape


def test_the_compiler_takes_the_operator_of_inference_where_nothing_learns() -> None:
    query, key, value, *_ = arguments(learning=True)
    graphs: list[str] = []

    def note(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    compiled = torch.compile(
        lambda *states: saobp.attention(*states, HIGH, backend="fused"), fullgraph=True, backend=note
    )
    with torch.no_grad():
        found = compiled(query, key, value)
    learned = compiled(query, key, value)
    assert ["short_refined_output" in graph for graph in graphs] == [True, False]
    assert torch.equal(found, learned)


@pytest.mark.parametrize("way", ["refined_attention", "causal_refined_output", "elemmul_attention"])
def test_operators_past_autograd_are_still_seen_and_learn_nothing(way: str) -> None:
    """Fake tensors, counters of work and the like watch operators from below autograd."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    options = {**varied(torch.float32)["plain"], "is_causal": way.startswith("causal")}
    if way.startswith("elemmul"):
        options["refinement"] = Refinement("elemmul")
    expected = call({**options, "query": options["query"].requires_grad_()}, "fused")
    with Watch(), torch.no_grad():
        found = call(options, "fused")
    assert f"saobp.{way}.default" in seen
    assert expected.requires_grad
    assert not found.requires_grad
    assert torch.equal(found, expected)

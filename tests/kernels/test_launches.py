"""Launching: what is remembered between calls, for which calls it counts, and what the operators promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

import saobp
from saobp import Refinement
from saobp.kernels import short_launch, start
from saobp.kernels.short_operator import short_refined_attention, short_refined_output
from saobp.testing.inputs import attention_inputs

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HIGH = Refinement("high", 0.2)


class Binary:
    """Stands for what Triton compiled: notes the launches that reach it directly."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


class Kernel:
    """Stands for a Triton kernel: each call through Triton is noted and gives the same binary."""

    arg_names = ("x_ptr", "y_ptr", "length", "ROWS")

    def __init__(self) -> None:
        self.binary = Binary()
        self.pre_run_hooks: list[Callable] = []
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Binary]:
        def call(*arguments: Any, **options: Any) -> Binary:
            self.calls.append((grid, arguments, options))
            return self.binary

        return call


class Driver:
    """Stands for a machine with several GPUs and streams."""

    def __init__(self) -> None:
        self.device: int | None = None
        self.stream = 7

    @property
    def active(self) -> Driver:
        return self

    def get_current_device(self) -> int | None:
        return self.device

    def get_current_stream(self, device: int | None) -> tuple[int | None, int]:
        return device, self.stream


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(start, "INTERPRETED", False)
    monkeypatch.setattr(start, "driver", driver)
    monkeypatch.setattr(start, "_launches", {})
    return driver


NUMBERS = {"length": 5, "ROWS": 16, "num_warps": 4, "maxnreg": None}


def test_the_first_launch_goes_through_triton_and_the_next_to_its_binary(machine: Driver) -> None:
    kernel, x, y = Kernel(), torch.zeros(4), torch.zeros(4)
    launch = start.Launch(kernel, 3, NUMBERS, x.device)
    launch(x, y)
    assert kernel.calls == [((3,), (x, y, 5, 16), {"num_warps": 4, "maxnreg": None})]
    assert not kernel.binary.launches
    launch(x, y)
    machine.stream = 8
    launch(y, x)
    assert len(kernel.calls) == 1
    ahead, behind = ("function", "metadata", None, None, None), (5, 16)
    assert kernel.binary.launches == [
        (3, 1, 1, (None, 7), *ahead, x.data_ptr(), y.data_ptr(), *behind),
        (3, 1, 1, (None, 8), *ahead, y.data_ptr(), x.data_ptr(), *behind),
    ]


@pytest.mark.usefixtures("machine")
def test_every_alignment_has_a_binary_of_its_own() -> None:
    kernel, x = Kernel(), torch.zeros(16)
    launch = start.Launch(kernel, 3, NUMBERS, x.device)
    for first, second in [(x, x), (x[1:], x), (x, x[1:]), (x[4:], x)]:
        launch(first, second)
    assert [len(kernel.calls), len(kernel.binary.launches)] == [3, 1]  # four floats on is aligned again


@pytest.mark.usefixtures("machine")
def test_profilers_are_told_of_every_launch() -> None:
    kernel, x = Kernel(), torch.zeros(4)
    launch = start.Launch(kernel, 3, NUMBERS, x.device)
    launch(x, x)
    note = lambda *_: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(note)
    try:
        launch(x, x)
    finally:
        knobs.runtime.launch_enter_hook.remove(note)
    kernel.pre_run_hooks.append(note)
    launch(x, x)
    assert [len(kernel.calls), len(kernel.binary.launches)] == [3, 0]
    kernel.pre_run_hooks.clear()
    launch(x, x)
    assert [len(kernel.calls), len(kernel.binary.launches)] == [3, 1]


def test_tensors_on_another_gpu_are_served_there(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        before, machine.device = machine.device, device.index
        yield
        machine.device = before

    monkeypatch.setattr(torch.cuda, "device", switched)
    machine.device = 0
    kernel, x = Kernel(), torch.zeros(4)
    launch = start.Launch(kernel, 3, NUMBERS, torch.device("cuda", 1))
    launch(x, x)
    launch(x, x)
    assert machine.device == 0
    assert kernel.binary.launches[0][3] == (1, 7)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("name", "changed"),
    [("length", 6), ("ROWS", 32), ("num_warps", 8), ("maxnreg", 168), ("y_ptr", torch.zeros(4).half())],
)
def test_a_kernel_starts_at_once_only_where_nothing_changed(name: str, changed: Any) -> None:
    kernel = Kernel()
    arguments = {**NUMBERS, "x_ptr": torch.zeros(4), "y_ptr": torch.zeros(4)}
    for given in (arguments, arguments, {**arguments, name: changed}):
        start.start_kernel(kernel, 3, **given)
    assert [len(kernel.calls), len(kernel.binary.launches)] == [2, 1]
    start.start_kernel(kernel, 4, **arguments)
    assert [len(kernel.calls), len(kernel.binary.launches)] == [3, 1]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "MOST_KEPT", 3)
    shelf: dict[Any, int] = {}
    for number in range(10):
        assert start.keep(shelf, number, number) == number
        assert len(shelf) <= 3


def varied() -> dict[str, dict[str, Any]]:
    """Calls that differ in one thing each, on values that are the same where they can be."""
    plain = attention_inputs(2, 2, 16, 16, dtype=torch.float16, device=DEVICE)
    states = {"query": plain.query, "key": plain.key, "value": plain.value}
    shifted = torch.empty(plain.query.numel() + 1, dtype=torch.float16, device=DEVICE)[1:]
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
        "strengths": {**states, "strength": strength, "strongest": 0.4},
        "strengths in half precision": {**states, "strength": strength.half()},
        "strengths of one entry": {**states, "strength": torch.tensor(0.3, device=DEVICE).expand(2)},
        "padding": {**states, "padding_mask": mask},
        "scale": {**states, "scale": 0.7},
        "factor": {**states, "refinement": Refinement("low", 0.2)},
        "listing": {**states, "refinement": Refinement("high-listing", 0.2)},
    }


def call(options: dict[str, Any], backend: str) -> Tensor:
    return saobp.attention(**{"refinement": HIGH, **options}, backend=backend)


@pytest.mark.parametrize("name", [name for name in varied() if name != "plain"])
def test_calls_in_turn_do_not_get_each_others_plan(name: str) -> None:
    calls = varied()
    for options in (calls["plain"], calls[name], calls["plain"], calls[name]):
        with torch.no_grad():
            found, expected = call(options, "fused"), call(options, "reference")
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_plans_are_shared_by_calls_that_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: dict[Any, Any] = {}
    monkeypatch.setattr(short_launch, "_plans", plans)
    calls = varied()
    for _ in range(2):
        for options in calls.values():
            call(options, "fused")
    alike = {"alignment"}  # these share a plan, and differ inside its launch
    assert len(plans) == len(calls) - len(alike)
    query, key, value = (calls["plain"][name].requires_grad_() for name in ("query", "key", "value"))
    for _ in range(2):
        call({"query": query, "key": key, "value": value}, "fused").sum().backward()
    assert len(plans) == len(calls) - len(alike) + 2  # forward that saves, and backward


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("strength", [0.2, 8.0])
def test_inference_gives_the_bits_of_training(strength: float, padded: bool) -> None:
    inputs = attention_inputs(
        2, 2, 20, 16, padding="right" if padded else None, dtype=torch.float16, device=DEVICE
    )
    query, key, value, _ = inputs.leaves()
    call = lambda: saobp.attention(  # noqa: E731
        query, key, value, Refinement("high", strength), padding_mask=inputs.padding_mask, backend="fused"
    )
    trained = call()
    with torch.no_grad():
        inferred = call()
    assert trained.requires_grad
    assert not inferred.requires_grad
    assert torch.equal(trained, inferred)


def arguments(learning: bool) -> tuple[Any, ...]:
    inputs = attention_inputs(1, 2, 20, 16, dtype=torch.float16, device=DEVICE)
    states = inputs.leaves() if learning else [leaf.detach() for leaf in inputs.leaves()]
    return (*states, None, None, None, 20, 0.25, 0.0, 1.0, True, 0.0)


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

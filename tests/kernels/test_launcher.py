"""Launching one kernel or a series: what goes through Triton, and what straight to a binary."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton import knobs

from saobp.kernels import dispatch
from saobp.kernels.runtime import launcher

CPU = torch.device("cpu")


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
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(launcher, "LAUNCHES_DIRECTLY", True)
    monkeypatch.setattr(launcher, "driver", driver)
    return driver


NUMBERS = {"length": 5, "ROWS": 16, "num_warps": 4, "maxnreg": None}


def test_the_first_launch_goes_through_triton_and_the_next_to_its_binary(machine: Driver) -> None:
    kernel, x, y = Kernel(), torch.zeros(4), torch.zeros(4)
    launch = launcher.KernelLaunch(kernel, 3, NUMBERS, x.device)
    launch(x, y)
    options = {"enable_fp_fusion": True, "num_warps": 4, "maxnreg": None}
    assert kernel.calls == [((3,), (x, y, 5, 16), options)]
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
def test_a_launch_keeps_its_binary() -> None:
    """From Triton 3.8 on the code of a binary that nobody keeps is unloaded."""
    kernel, x, launches = Kernel(), torch.zeros(4), []
    kernel.binary.run = lambda *given: launches.append(given)  # type: ignore[method-assign]  # as Triton's, without it
    launch = launcher.KernelLaunch(kernel, 3, NUMBERS, x.device)
    launch(x, x)
    used = weakref.ref(kernel.binary)
    kernel.binary = Binary()  # as where Triton's own cache is cleared
    launch(x, x)
    assert used() is not None
    assert [len(kernel.calls), len(launches)] == [1, 1]


@pytest.mark.usefixtures("machine")
def test_every_alignment_has_a_binary_of_its_own() -> None:
    kernel, x = Kernel(), torch.zeros(16)
    launch = launcher.KernelLaunch(kernel, 3, NUMBERS, x.device)
    for first, second in [(x, x), (x[1:], x), (x, x[1:]), (x[4:], x)]:
        launch(first, second)
    assert [len(kernel.calls), len(kernel.binary.launches)] == [3, 1]  # four floats on is aligned again


@pytest.mark.usefixtures("machine")
def test_profilers_are_told_of_every_launch() -> None:
    kernel, x = Kernel(), torch.zeros(4)
    launch = launcher.KernelLaunch(kernel, 3, NUMBERS, x.device)
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


def switching(machine: Driver) -> Callable[[torch.device], Any]:
    @contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        before, machine.device = machine.device, device.index
        yield
        machine.device = before

    return switched


def test_tensors_on_another_gpu_are_served_there(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", switching(machine))
    machine.device = 0
    kernel, x = Kernel(), torch.zeros(4)
    launch = launcher.KernelLaunch(kernel, 3, NUMBERS, torch.device("cuda", 1))
    launch(x, x)
    launch(x, x)
    assert machine.device == 0
    assert kernel.binary.launches[0][3] == (1, 7)


def test_an_unknown_triton_is_left_to_launch_by_itself(
    machine: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What launches directly is internal to Triton: with another version every launch goes through it."""
    monkeypatch.setattr(launcher.triton, "__version__", "4.0.0")
    assert not launcher.is_known_triton()
    monkeypatch.setattr(launcher, "LAUNCHES_DIRECTLY", launcher.is_known_triton())
    monkeypatch.setattr(torch.cuda, "device", switching(machine))
    machine.get_current_stream = machine.get_current_device = None  # type: ignore[method-assign,assignment]
    kernel, x = Kernel(), torch.zeros(4)
    launch = launcher.KernelLaunch(kernel, 3, NUMBERS, torch.device("cuda", 1))
    for _ in range(3):
        launch(x, x)
    assert [len(kernel.calls), len(kernel.binary.launches)] == [3, 0]
    assert not dispatch.has_hopper_kernel(90)


def series(
    kernel: Kernel, device: torch.device = CPU, *, length: int = 5, compiled: dict[Any, Any] | None = None
) -> launcher.LaunchSequence:
    """Two launches: one on a tensor and a piece of a buffer, one on two pieces."""
    pieces, _ = launcher.lay_out_buffer("buffer", {"y": ((3,), torch.float16), "z": ((2, 2), torch.float32)})
    made = launcher.LaunchSequence(device, ("x", "buffer"), pieces, compiled)
    made.add(kernel, 3, {**NUMBERS, "length": length})
    made.add(kernel, 4, {**NUMBERS, "length": 6, "unasked": 1}, x="z")
    return made


def test_a_series_goes_through_triton_and_then_to_its_binaries(machine: Driver) -> None:
    kernel, x, buffer = Kernel(), torch.zeros(4), torch.zeros(32, dtype=torch.uint8)
    launches = series(kernel)
    launches(x, buffer)
    (_, first, options), (_, second, _) = kernel.calls
    assert options == {"enable_fp_fusion": True, "num_warps": 4, "maxnreg": None}
    assert first[0] is x
    assert first[1].dtype == second[1].dtype == torch.float16
    assert (second[0].dtype, second[0].shape) == (torch.float32, (2, 2))
    y, z = buffer.data_ptr(), buffer.data_ptr() + 16
    assert [tensor.data_ptr() for tensor in (first[1], second[0], second[1])] == [y, z, y]
    assert [first[2:], second[2:]] == [(5, 16), (6, 16)]
    assert not kernel.binary.launches
    machine.stream = 8
    launches(x, buffer)
    assert len(kernel.calls) == 2
    ahead = (1, 1, (None, 8), "function", "metadata", None, None, None)
    assert kernel.binary.launches == [(3, *ahead, x.data_ptr(), y, 5, 16), (4, *ahead, z, y, 6, 16)]


@pytest.mark.usefixtures("machine")
def test_every_alignment_of_a_series_has_binaries_of_its_own() -> None:
    kernel, x, buffer = Kernel(), torch.zeros(16), torch.zeros(64, dtype=torch.uint8)
    launches = series(kernel)
    for first, second in [(x, buffer), (x[1:], buffer), (x, buffer[4:]), (x[4:], buffer[16:])]:
        launches(first, second)
    assert [len(kernel.calls), len(kernel.binary.launches)] == [6, 2]


@pytest.mark.usefixtures("machine")
def test_series_that_share_binaries_keep_their_own_numbers() -> None:
    kernel, x, buffer = Kernel(), torch.zeros(16), torch.zeros(32, dtype=torch.uint8)
    compiled: dict[Any, Any] = {}
    series(kernel, compiled=compiled)(x, buffer)
    longer = series(kernel, length=9, compiled=compiled)
    longer(x[4:], buffer)
    assert len(kernel.calls) == 2
    assert kernel.binary.launches[0][-4:-2] == (x[4:].data_ptr(), buffer.data_ptr())
    assert [launch[-2:] for launch in kernel.binary.launches] == [(9, 16), (6, 16)]
    longer(x[1:], buffer)
    assert len(kernel.calls) == 4


@pytest.mark.usefixtures("machine")
def test_profilers_are_told_of_every_launch_of_a_series() -> None:
    kernel, x, buffer = Kernel(), torch.zeros(4), torch.zeros(32, dtype=torch.uint8)
    launches = series(kernel)
    launches(x, buffer)
    kernel.pre_run_hooks.append(lambda *_: None)
    launches(x, buffer)
    assert [len(kernel.calls), len(kernel.binary.launches)] == [4, 0]


def test_a_series_is_served_on_its_gpu(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", switching(machine))
    machine.device = 0
    kernel, x, buffer = Kernel(), torch.zeros(4), torch.zeros(32, dtype=torch.uint8)
    launches = series(kernel, torch.device("cuda", 1))
    launches(x, buffer)
    launches(x, buffer)
    assert machine.device == 0
    assert [launch[3] for launch in kernel.binary.launches] == [(1, 7)] * 2


@pytest.mark.parametrize("alignment", [4, 16])
def test_slices_of_a_buffer_do_not_overlap(alignment: int) -> None:
    wanted = {
        "odd": ((3, 1), torch.float16), "none": ((0,), torch.float32),
        "map": ((2, 3), torch.float32), "last": ((5,), torch.bfloat16),
    }  # fmt: skip
    pieces, size = launcher.lay_out_buffer("buffer", wanted, alignment=alignment)
    buffer = torch.zeros(size, dtype=torch.uint8)
    for number, (name, piece) in enumerate(pieces.items()):
        view = piece.view(buffer)
        assert (tuple(view.shape), view.dtype) == wanted[name]
        assert piece.start % alignment == 0
        view.fill_(number + 1)
    for number, piece in enumerate(pieces.values()):
        assert bool((piece.view(buffer) == number + 1).all())


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MAX_CACHED", 3)
    cache: dict[Any, int] = {}
    for number in range(10):
        assert launcher.cached(cache, number, int, number) == number
        assert len(cache) <= 3

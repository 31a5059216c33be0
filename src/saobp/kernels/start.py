"""Launching kernels at little cost: Triton's own binding of some fifty arguments takes longer than a short kernel.

Every kernel names its pointers, which end in ``_ptr``, before its numbers. All that Triton compiles for follows from
the numbers, from the types and the device of the tensors, and from the alignment of their addresses.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from saobp.kernels import arithmetic

INTERPRETED = bool(arithmetic.INTERPRETED)
OPTIONS = ("num_warps", "num_stages", "maxnreg")
MOST_KEPT = 4096
"""Shapes remembered for each purpose; then all are forgotten, which costs time but nothing else."""

Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept")


class Launch:
    """A kernel with its numbers, for tensors of known types on one device: what is left to give are these tensors.

    The first call with addresses of an alignment goes through Triton, which compiles. Later ones go to the binary at
    once, with addresses in place of tensors.
    """

    def __init__(self, kernel: Any, programs: int, numbers: Mapping[str, Any], device: torch.device) -> None:
        self.kernel, self.programs, self.device = kernel, programs, device
        self.numbers = tuple(numbers[name] for name in kernel.arg_names if not name.endswith("_ptr"))
        self.options = {name: numbers[name] for name in OPTIONS if name in numbers}
        self._ready: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        if INTERPRETED:
            self._by_triton(tensors)
            return
        gpu, place = driver.active, self.device.index
        if place != gpu.get_current_device():
            with torch.cuda.device(self.device):
                self(*tensors)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        alignment = tuple([address & 15 for address in addresses])
        ready = self._ready.get(alignment)
        if ready is None or is_watched(self.kernel):
            binary = self._by_triton(tensors)
            if binary is not None:
                self._ready[alignment] = (binary.run, binary.function, binary.packed_metadata)
            return
        run, function, metadata = ready
        run(
            self.programs, 1, 1, gpu.get_current_stream(place), function, metadata,
            None, None, None, *addresses, *self.numbers,
        )  # fmt: skip

    def _by_triton(self, tensors: tuple[Tensor, ...]) -> Any:
        return self.kernel[(self.programs,)](*tensors, *self.numbers, **self.options)


def is_watched(*kernels: Any) -> bool:
    """Whether someone asked Triton to be told of launches, as profilers do."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return True
    return any(kernel.pre_run_hooks for kernel in kernels)


class Piece(NamedTuple):
    """A vector or a map inside a buffer of bytes, which is cheaper than a tensor of its own."""

    buffer: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        stop = self.start + math.prod(self.shape) * self.dtype.itemsize
        return buffer[self.start : stop].view(self.dtype).view(self.shape)


def lay_out(
    buffer: str, pieces: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, apart: int = 16
) -> tuple[dict[str, Piece], int]:
    """Where pieces of these shapes and types lie in a buffer, and its bytes.

    They start at multiples of ``apart`` bytes: 16 is what Triton's fastest code asks for, 4 leaves no gaps, whose
    bytes would differ from call to call, between pieces of float32.
    """
    places: dict[str, Piece] = {}
    end = 0
    for name, (shape, dtype) in pieces.items():
        start = -(-end // apart) * apart
        places[name] = Piece(buffer, start, shape, dtype)
        end = start + math.prod(shape) * dtype.itemsize
    return places, end


class Series:
    """Launches that follow each other on the same tensors and pieces of them: one look at addresses serves them all.

    Tensors are named, in the order in which a call gives them, by the arguments of kernels less ``_ptr``.
    """

    def __init__(self, device: torch.device, tensors: Sequence[str], pieces: Mapping[str, Piece]) -> None:
        self.device = device
        self.launches: list[tuple[Launch, itemgetter]] = []
        self.pieces = tuple(pieces.values())
        self._kernels: list[Any] = []
        self._names = (*tensors, *pieces)
        self._starts = [(tensors.index(piece.buffer), piece.start) for piece in self.pieces]
        self._ready: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}

    def add(self, kernel: Any, programs: int, numbers: Mapping[str, Any], **named: str) -> None:
        """Adds a kernel with those of the numbers that it takes; ``named`` says what else an argument means."""
        arguments = [name.removesuffix("_ptr") for name in kernel.arg_names if name.endswith("_ptr")]
        places = [self._names.index(named.get(name, name)) for name in arguments]
        self._kernels.append(kernel)
        self.launches.append((Launch(kernel, programs, numbers, self.device), itemgetter(*places)))

    def __call__(self, *tensors: Tensor) -> None:
        if INTERPRETED:
            self._by_triton(tensors)
            return
        gpu, place = driver.active, self.device.index
        if place != gpu.get_current_device():
            with torch.cuda.device(self.device):
                self(*tensors)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        alignment = tuple([address & 15 for address in addresses])
        ready = self._ready.get(alignment)
        if ready is None or is_watched(*self._kernels):
            self._by_triton(tensors, alignment)
            return
        addresses += [addresses[buffer] + start for buffer, start in self._starts]
        stream = gpu.get_current_stream(place)
        for run, programs, function, metadata, pick, numbers in ready:
            run(
                programs, 1, 1, stream, function, metadata, None, None, None, *pick(addresses), *numbers
            )  # fmt: skip

    def _by_triton(self, tensors: tuple[Tensor, ...], alignment: tuple[int, ...] | None = None) -> None:
        buffers = dict(zip(self._names, tensors, strict=False))
        every = (*tensors, *[piece.view(buffers[piece.buffer]) for piece in self.pieces])
        ready = []
        for launch, pick in self.launches:
            binary = launch._by_triton(pick(every))
            if binary is not None:
                found = (binary.run, launch.programs, binary.function, binary.packed_metadata)
                ready.append((*found, pick, launch.numbers))
        if alignment is not None and len(ready) == len(self.launches):
            self._ready[alignment] = ready


def keep(shelf: dict[Key, Kept], key: Key, made: Kept) -> Kept:
    """Puts what was made on a shelf of bounded size."""
    if len(shelf) >= MOST_KEPT:
        shelf.clear()
    shelf[key] = made
    return made

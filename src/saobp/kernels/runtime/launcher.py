"""Launching kernels at little cost: Triton's own binding of some fifty arguments takes longer than a short kernel.

Every kernel names its pointers, which end in ``_ptr``, before its numbers, and between them, ending in ``_map``, tensors
that a GPU's copy engine may fetch tiles of. All that Triton compiles for follows from the numbers, from the types and the
device of the tensors, and from the alignment of their addresses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from saobp.kernels.library import arithmetic

INTERPRETED = bool(arithmetic.INTERPRETED)
OPTIONS = ("num_warps", "num_stages", "maxnreg")
HOPPER = 90
MOST_KEPT = 4096
"""Shapes remembered for each purpose; then all are forgotten, which costs time but nothing else."""

Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept")


class Prepared(ABC):
    """Something to launch on tensors of known types on one device.

    The first call with addresses of an alignment goes through Triton, which compiles. Later ones go to the binaries at
    once, with addresses in place of tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kernels: list[Any] = []
        self._ready: dict[tuple[int, ...], Any] = {}

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
        if ready is not None and not is_watched(*self._kernels):
            self._at_once(ready, addresses, gpu.get_current_stream(place))
            return
        ready = self._by_triton(tensors)
        if ready is not None:
            self._ready[alignment] = ready

    @abstractmethod
    def _by_triton(self, tensors: tuple[Tensor, ...]) -> Any:
        """Launches, and gives what a later call needs, if Triton tells."""

    @abstractmethod
    def _at_once(self, ready: Any, addresses: list[int], stream: int) -> None:
        """Launches what an earlier call got ready."""


class Tiles(NamedTuple):
    """How a GPU's copy engine sees a tensor: its shape, strides, and the tiles that it fetches.

    A kernel in Gluon says by ``layout`` how they lie in shared memory; for others Triton decides that.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]
    layout: Any = None

    def of(self, tensor: Tensor) -> Any:
        sizes = (tensor, list(self.shape), list(self.strides), list(self.tile))
        if self.layout is None:
            return TensorDescriptor(*sizes)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(*sizes, self.layout)

    def at(self, address: int) -> TilesAt:
        return TilesAt(address, self.shape, self.strides)


class TilesAt(NamedTuple):
    """What Triton asks of a descriptor when it launches, without a tensor."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    @property
    def base(self) -> TilesAt:
        return self

    def data_ptr(self) -> int:
        return self.address


class Launch(Prepared):
    """A kernel with its numbers: what is left to give are its tensors.

    ``tiles`` tells for arguments that end in ``_map`` which tiles of ``_ptr`` to fetch; a kernel does without the others.
    """

    def __init__(
        self, kernel: Any, programs: int, numbers: Mapping[str, Any], device: torch.device,
        tiles: Mapping[str, Tiles] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device)
        self._kernels.append(kernel)
        self.kernel, self.programs = kernel, programs
        pointers = [name.removesuffix("_ptr") for name in kernel.arg_names if name.endswith("_ptr")]
        maps = [name.removesuffix("_map") for name in kernel.arg_names if name.endswith("_map")]
        self.maps = [(pointers.index(name), (tiles or {}).get(name)) for name in maps]
        others = [name for name in kernel.arg_names if not name.endswith(("_ptr", "_map"))]
        self.numbers = tuple(numbers[name] for name in others)
        self.options = {name: numbers[name] for name in OPTIONS if name in numbers}

    def _by_triton(self, tensors: tuple[Tensor, ...], parts: int = 1) -> tuple[Any, Any, Any] | None:
        maps = [tensors[place] if tiles is None else tiles.of(tensors[place]) for place, tiles in self.maps]
        binary = self.kernel[(self.programs // parts,)](*tensors, *maps, *self.numbers, **self.options)
        return None if binary is None else (binary.run, binary.function, binary.packed_metadata)

    def _at_once(
        self, ready: tuple[Any, Any, Any], addresses: Sequence[int], stream: int, parts: int = 1
    ) -> None:
        run, function, metadata = ready
        maps = [addresses[at] if tiles is None else tiles.at(addresses[at]) for at, tiles in self.maps]
        run(
            self.programs // parts, 1, 1, stream, function, metadata, None, None, None,
            *addresses, *maps, *self.numbers,
        )  # fmt: skip


def has_copy_engine(device: torch.device) -> bool:
    """Whether the GPU fetches tiles by itself: Hopper and later. The interpreter does as if."""
    return INTERPRETED or cuda_generation(device) >= HOPPER


@lru_cache
def cuda_generation(device: torch.device) -> int:
    """Ten times the compute capability of an NVIDIA GPU, 0 for others."""
    with torch.cuda.device(-1 if device.index is None else device.index):  # -1: the present one
        target = driver.active.get_current_target()
    return target.arch if target.backend == "cuda" else 0


def is_aligned(states: Tensor) -> bool:
    """Whether the copy engine can fetch half types from there: addresses and strides in units of 16 bytes."""
    *others, last = states.stride()
    return last == 1 and states.data_ptr() % 16 == 0 and all(one > 0 and one % 8 == 0 for one in others)


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

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.bytes].view(self.dtype).view(self.shape)


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


class Series(Prepared):
    """Launches that follow each other on the same tensors and pieces of them: one look at addresses serves them all.

    Tensors are named, in the order in which a call gives them, by the arguments of kernels less ``_ptr``.
    """

    def __init__(self, device: torch.device, tensors: Sequence[str], pieces: Mapping[str, Piece]) -> None:
        super().__init__(device)
        self.launches: list[tuple[Launch, itemgetter]] = []
        self.pieces = tuple(pieces.values())
        self._names = (*tensors, *pieces)
        self._starts = [(tensors.index(piece.buffer), piece.start) for piece in self.pieces]
        self._moves: list[int] = []

    def add(
        self, kernel: Any, programs: int, numbers: Mapping[str, Any], tiles: Mapping[str, Tiles] | None = None, /,
        **named: str,
    ) -> None:  # fmt: skip
        """Adds a kernel with those of the numbers that it takes; ``named`` says what else an argument means."""
        arguments = [name.removesuffix("_ptr") for name in kernel.arg_names if name.endswith("_ptr")]
        places = [self._names.index(named.get(name, name)) for name in arguments]
        self._kernels.append(kernel)
        self.launches.append((Launch(kernel, programs, numbers, self.device, tiles), itemgetter(*places)))

    def in_halves(self, moves: Mapping[str, int]) -> None:
        """Makes two launches of each, side by side, for half of the programs each (see ``saobp.kernels.runtime.two_streams``).

        moves: bytes from where the first half finds a tensor or piece to where the second does; nothing, no halves
        """
        self._moves = [moves.get(name, 0) for name in self._names] if moves else []

    def _by_triton(self, tensors: tuple[Tensor, ...]) -> list[Any] | None:
        buffers = dict(zip(self._names, tensors, strict=False))
        every = (*tensors, *[piece.view(buffers[piece.buffer]) for piece in self.pieces])
        if not self._moves:
            ready = [launch._by_triton(pick(every)) for launch, pick in self.launches]
        else:
            others = tuple(moved(one, move) for one, move in zip(every, self._moves, strict=True))
            ready = []
            for launch, pick in self.launches:
                ready.append(launch._by_triton(pick(every), 2))
                launch._by_triton(pick(others), 2)
        return None if None in ready else ready

    def _at_once(self, ready: list[Any], addresses: list[int], stream: int) -> None:
        addresses += [addresses[buffer] + start for buffer, start in self._starts]
        if not self._moves:
            for (launch, pick), one in zip(self.launches, ready, strict=True):
                launch._at_once(one, pick(addresses), stream)
            return
        others = [address + move for address, move in zip(addresses, self._moves, strict=True)]
        with beside(self.device, stream) as side:
            for (launch, pick), one in zip(self.launches, ready, strict=True):
                launch._at_once(one, pick(addresses), side, 2)
                launch._at_once(one, pick(others), stream, 2)


def moved(tensor: Tensor, move: int) -> Tensor:
    """The number so many bytes behind a tensor's first one: to a kernel, an address."""
    if tensor.numel() == 0:
        return tensor
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + move // tensor.itemsize)


@contextmanager
def beside(device: torch.device, stream: int) -> Iterator[int]:
    """A second stream, which begins after what the caller's present one holds; that one then waits for it.

    Also where a launch fails or is interrupted: memory that the second one still fills goes back to the first.
    """
    present, side = torch.cuda.current_stream(device), side_stream(device, stream)
    side.wait_stream(present)
    try:
        yield side.cuda_stream
    finally:
        present.wait_stream(side)


@lru_cache
def side_stream(device: torch.device, _stream: int) -> torch.cuda.Stream:
    """The one beside a stream of the caller's: callers with streams of their own do not meet there."""
    return torch.cuda.Stream(device)


def remembered(shelf: dict[Key, Kept], key: Key, make: Callable[..., Kept], *arguments: Any) -> Kept:
    """What lies on a shelf under a key; made of the arguments where nothing does. A full shelf is emptied first."""
    found = shelf.get(key)
    if found is None:
        if len(shelf) >= MOST_KEPT:
            shelf.clear()
        found = shelf[key] = make(*arguments)
    return found

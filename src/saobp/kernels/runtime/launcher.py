"""Launching kernels with little overhead: Triton binds some fifty arguments at every launch, which takes longer than a
short kernel runs.

The first launch goes through Triton, which compiles; later ones call the binary as Triton's own launcher would. That is
internal to Triton, so only known versions do it; with others every launch goes through Triton.

Kernel arguments are pointers, ending in ``_ptr``, then TMA descriptors, ending in ``_map``, then numbers. The binary that
Triton selects depends on the numbers, the types and device of the tensors, and the alignment of their addresses.
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
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from saobp.kernels.call_spec import CallSpec
from saobp.kernels.calls import Family, KernelChoice
from saobp.kernels.dispatch import HOPPER, select_kernels
from saobp.kernels.library import arithmetic

INTERPRETED = bool(arithmetic.INTERPRETED)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
MAX_CACHED = 4096
"""Maximum entries of a cache; a full one is cleared."""

KNOWN_TRITON = ("3.6.", "3.7.")
"""Versions of Triton with which kernels in Gluon and direct launches are used. 3.8 and 3.9 compile the kernels too; they belong
here once ``make test-gpu`` has passed with them and the kernels are not slower."""


def is_known_triton() -> bool:
    return triton.__version__.startswith(KNOWN_TRITON)


LAUNCHES_DIRECTLY = is_known_triton()

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class CachedLaunch(ABC):
    """One or several launches on tensors of fixed types on one device.

    The first call for each alignment of addresses goes through Triton, which compiles. Later ones launch the cached
    binaries directly, with addresses instead of tensors.
    """

    def __init__(self, device: torch.device, compiled: dict[tuple[int, ...], Any] | None = None) -> None:
        self.device = device
        self._kernels: list[Any] = []
        self._compiled = {} if compiled is None else compiled

    def __call__(self, *tensors: Tensor) -> None:
        if INTERPRETED:
            self._through_triton(tensors)
            return
        if not LAUNCHES_DIRECTLY:
            with torch.cuda.device(self.device):
                self._through_triton(tensors)
            return
        gpu, index = driver.active, self.device.index
        if index != gpu.get_current_device():
            with torch.cuda.device(self.device):
                self(*tensors)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        alignment = tuple([address & 15 for address in addresses])
        compiled = self._compiled.get(alignment)
        if compiled is not None and not has_launch_hooks(*self._kernels):
            self._directly(compiled, addresses, gpu.get_current_stream(index))
            return
        compiled = self._through_triton(tensors)
        if compiled is not None:
            self._compiled[alignment] = compiled

    @abstractmethod
    def _through_triton(self, tensors: tuple[Tensor, ...]) -> Any:
        """Launches; returns what ``_directly`` needs, or None."""

    @abstractmethod
    def _directly(self, compiled: Any, addresses: list[int], stream: int) -> None:
        """Launches binaries that an earlier call compiled."""


class TileDescriptor(NamedTuple):
    """A TMA descriptor: shape, strides and tile shape of a tensor.

    ``layout`` of tiles in shared memory is for Gluon kernels; for others Triton chooses it.
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

    def at(self, address: int) -> DescriptorAtAddress:
        return DescriptorAtAddress(address, self.shape, self.strides)


class DescriptorAtAddress(NamedTuple):
    """The attributes that Triton's launcher reads of a descriptor, for an address instead of a tensor."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    @property
    def base(self) -> DescriptorAtAddress:
        return self

    def data_ptr(self) -> int:
        return self.address


class KernelLaunch(CachedLaunch):
    """A kernel with its grid and all arguments but its pointers.

    ``tiles`` has descriptors of ``_map`` arguments; one without gets the pointer, unused. Products and sums are fused, as
    the error budgets were measured; Triton will change its default.
    """

    def __init__(
        self, kernel: Any, programs: int, numbers: Mapping[str, Any], device: torch.device,
        tiles: Mapping[str, TileDescriptor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device)
        self._kernels.append(kernel)
        self.kernel, self.programs = kernel, programs
        pointers = [name.removesuffix("_ptr") for name in kernel.arg_names if name.endswith("_ptr")]
        maps = [name.removesuffix("_map") for name in kernel.arg_names if name.endswith("_map")]
        self.maps = [(pointers.index(name), (tiles or {}).get(name)) for name in maps]
        self.names = [name for name in kernel.arg_names if not name.endswith(("_ptr", "_map"))]
        self.numbers = tuple(numbers[name] for name in self.names)
        self.options = {
            "enable_fp_fusion": True,
            **{name: numbers[name] for name in OPTIONS if name in numbers},
        }

    def _through_triton(self, tensors: tuple[Tensor, ...], parts: int = 1) -> tuple[Any, ...] | None:
        """What ``_directly`` takes, and the binary itself: from Triton 3.8 on its code is unloaded with it."""
        maps = [tensors[index] if tiles is None else tiles.of(tensors[index]) for index, tiles in self.maps]
        binary = self.kernel[(self.programs // parts,)](*tensors, *maps, *self.numbers, **self.options)
        return None if binary is None else (binary.run, binary.function, binary.packed_metadata, binary)

    def _directly(
        self, compiled: tuple[Any, ...], addresses: Sequence[int], stream: int, parts: int = 1
    ) -> None:
        run, function, metadata, _ = compiled
        maps: Sequence[Any] = ()
        if self.maps:
            given = [(addresses[index], tiles) for index, tiles in self.maps]
            maps = [address if tiles is None else tiles.at(address) for address, tiles in given]
        run(
            self.programs // parts, 1, 1, stream, function, metadata, None, None, None,
            *addresses, *maps, *self.numbers,
        )  # fmt: skip


@lru_cache
def compute_capability(device: torch.device) -> int:
    """Ten times the compute capability of an NVIDIA GPU, 0 for others. The interpreter emulates Hopper's TMA."""
    if INTERPRETED:
        return HOPPER
    with torch.cuda.device(-1 if device.index is None else device.index):  # -1: the current device
        target = driver.active.get_current_target()
    return target.arch if target.backend == "cuda" else 0


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def kernels_for(family: Family, spec: CallSpec, *states: Tensor) -> KernelChoice:
    """``dispatch.select_kernels`` for states on their GPU."""
    aligned = all(is_aligned(one) for one in states)
    return select_kernels(family, spec, aligned=aligned, capability=compute_capability(states[0].device))


def is_aligned(states: Tensor) -> bool:
    """Whether TMA can fetch half types: address and strides are multiples of 16 bytes."""
    *others, last = states.stride()
    return last == 1 and states.data_ptr() % 16 == 0 and all(one > 0 and one % 8 == 0 for one in others)


def has_launch_hooks(*kernels: Any) -> bool:
    """Whether launch hooks are registered with Triton, as by profilers."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return True
    return any(kernel.pre_run_hooks for kernel in kernels)


class BufferSlice(NamedTuple):
    """A tensor inside a byte buffer: one allocation for several tensors is cheaper."""

    buffer: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.bytes].view(self.dtype).view(self.shape)


def lay_out_buffer(
    buffer: str,
    slices: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    *,
    alignment: int = 16,
    start: int = 0,
) -> tuple[dict[str, BufferSlice], int]:
    """Slices of these shapes and types in a buffer, and its bytes.

    They begin at byte ``start``, and each at multiples of ``alignment`` bytes: 16 for Triton's fastest code; 4 leaves no gaps between slices of
    float32, whose uninitialised bytes would differ between calls.
    """
    found: dict[str, BufferSlice] = {}
    end = start
    for name, (shape, dtype) in slices.items():
        place = -(-end // alignment) * alignment
        found[name] = BufferSlice(buffer, place, shape, dtype)
        end = place + math.prod(shape) * dtype.itemsize
    return found, end


class LaunchSequence(CachedLaunch):
    """Consecutive launches on the same tensors and slices of them.

    tensors: the kernels' argument names without ``_ptr``, in the order of a call's tensors
    compiled: binaries by alignment, a dict that sequences share whose kernels are compiled for the same constants and types
    """

    def __init__(
        self, device: torch.device, tensors: Sequence[str], slices: Mapping[str, BufferSlice],
        compiled: dict[tuple[int, ...], Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device, compiled)
        self.launches: list[tuple[KernelLaunch, itemgetter]] = []
        self.slices = tuple(slices.values())
        self._names = (*tensors, *slices)
        self._starts = [(tensors.index(part.buffer), part.start) for part in self.slices]
        self._offsets: list[int] = []

    def add(
        self, kernel: Any, programs: int, numbers: Mapping[str, Any], tiles: Mapping[str, TileDescriptor] | None = None, /,
        **named: str,
    ) -> None:  # fmt: skip
        """Adds a kernel; ``numbers`` that it has no argument for are ignored; ``named`` renames: argument="tensor"."""
        arguments = [name.removesuffix("_ptr") for name in kernel.arg_names if name.endswith("_ptr")]
        indices = [self._names.index(named.get(name, name)) for name in arguments]
        self._kernels.append(kernel)
        self.launches.append(
            (KernelLaunch(kernel, programs, numbers, self.device, tiles), itemgetter(*indices))
        )

    def in_two_streams(self, offsets: Mapping[str, int]) -> None:
        """Splits each launch into two of half the programs, on two streams (see ``runtime.two_streams``).

        offsets: byte offset of a tensor's or slice's second half; empty for no split
        """
        self._offsets = [offsets.get(name, 0) for name in self._names] if offsets else []

    def _through_triton(self, tensors: tuple[Tensor, ...]) -> list[Any] | None:
        buffers = dict(zip(self._names, tensors, strict=False))
        every = (*tensors, *[part.view(buffers[part.buffer]) for part in self.slices])
        if not self._offsets:
            compiled = [launch._through_triton(pick(every)) for launch, pick in self.launches]
        else:
            others = tuple(at_offset(one, offset) for one, offset in zip(every, self._offsets, strict=True))
            compiled = []
            for launch, pick in self.launches:
                compiled.append(launch._through_triton(pick(every), 2))
                launch._through_triton(pick(others), 2)
        return None if None in compiled else compiled

    def _directly(self, compiled: list[Any], addresses: list[int], stream: int) -> None:
        if self._starts:
            addresses += [addresses[buffer] + start for buffer, start in self._starts]
        if not self._offsets:
            for (launch, pick), one in zip(self.launches, compiled, strict=True):
                launch._directly(one, pick(addresses), stream)
            return
        others = [address + offset for address, offset in zip(addresses, self._offsets, strict=True)]
        with fork_stream(self.device, stream) as side:
            for (launch, pick), one in zip(self.launches, compiled, strict=True):
                launch._directly(one, pick(addresses), side, 2)
                launch._directly(one, pick(others), stream, 2)


def at_offset(tensor: Tensor, offset: int) -> Tensor:
    """A view of the tensor that starts ``offset`` bytes later; kernels use only its address."""
    if tensor.numel() == 0:
        return tensor
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset // tensor.itemsize)


@contextmanager
def fork_stream(device: torch.device, stream: int) -> Iterator[int]:
    """A second stream that waits for the caller's stream, which waits for it at the end.

    Also on exceptions: memory that the second stream still writes is freed to the first stream's allocator.
    """
    current, side = torch.cuda.current_stream(device), side_stream(device, stream)
    side.wait_stream(current)
    try:
        yield side.cuda_stream
    finally:
        current.wait_stream(side)


@lru_cache
def side_stream(device: torch.device, _stream: int) -> torch.cuda.Stream:
    """The second stream, one for each stream of the caller."""
    return torch.cuda.Stream(device)


def cached(cache: dict[Key, Value], key: Key, make: Callable[..., Value], *arguments: Any) -> Value:
    """The entry of a key; on a miss ``make(*arguments)``. A full cache is cleared first."""
    found = cache.get(key)
    if found is None:
        if len(cache) >= MAX_CACHED:
            cache.clear()
        found = cache[key] = make(*arguments)
    return found

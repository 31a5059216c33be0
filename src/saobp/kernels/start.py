"""Launching kernels at little cost: Triton's own binding of some fifty arguments takes longer than a short kernel.

Every kernel names its pointers, which end in ``_ptr``, before its numbers. All that Triton compiles for follows from
the numbers, from the types and the device of the tensors, and from the alignment of their addresses.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from operator import itemgetter
from typing import Any, TypeVar

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


def is_watched(kernel: Any) -> bool:
    """Whether someone asked Triton to be told of launches, as profilers do."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or kernel.pre_run_hooks)


_launches: dict[Hashable, Launch] = {}
_readers: dict[int, tuple[Any, itemgetter, itemgetter]] = {}


def start_kernel(kernel: Any, programs: int, **arguments: Any) -> None:
    """Runs ``programs`` copies of a kernel; one whose numbers and types were seen before starts at once."""
    place = id(kernel)  # Triton's own hash of a kernel takes a lock
    _, pointers, numbers = _readers.get(place) or keep(_readers, place, (kernel, *readers(kernel)))
    tensors = pointers(arguments)
    key = (
        place, programs, numbers(arguments), *[tensor.dtype for tensor in tensors], *[tensor.device for tensor in tensors],
        *[arguments.get(option) for option in OPTIONS],
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = keep(_launches, key, Launch(kernel, programs, arguments, tensors[0].device))
    launch(*tensors)


def readers(kernel: Any) -> tuple[itemgetter, itemgetter]:
    """How to take a kernel's tensors and its numbers from its arguments, in order; there are several of each."""
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    return itemgetter(*pointers), itemgetter(*kernel.arg_names[len(pointers) :])


def keep(shelf: dict[Key, Kept], key: Key, made: Kept) -> Kept:
    """Puts what was made on a shelf of bounded size."""
    if len(shelf) >= MOST_KEPT:
        shelf.clear()
    shelf[key] = made
    return made

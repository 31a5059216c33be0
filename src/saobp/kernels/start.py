"""Launching kernels at little cost: Triton's own binding of some fifty arguments takes longer than a short kernel.

Every kernel names its pointers, which end in ``_ptr``, before its numbers. All that Triton compiles for follows from
the numbers, from the types and the device of the tensors, and from the alignment of their addresses.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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
        self._binaries: dict[tuple[int, ...], Any] = {}

    def __call__(self, *tensors: Tensor) -> None:
        if INTERPRETED:
            self._by_triton(tensors)
            return
        if self.device.index != driver.active.get_current_device():
            with torch.cuda.device(self.device):
                self._start(tensors)
        else:
            self._start(tensors)

    def _start(self, tensors: tuple[Tensor, ...]) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        alignment = tuple([address & 15 for address in addresses])
        binary = self._binaries.get(alignment)
        if binary is None or is_watched(self.kernel):
            self._binaries[alignment] = self._by_triton(tensors)
            return
        binary.run(
            self.programs, 1, 1, driver.active.get_current_stream(self.device.index), binary.function,
            binary.packed_metadata, None, None, None, *addresses, *self.numbers,
        )  # fmt: skip

    def _by_triton(self, tensors: tuple[Tensor, ...]) -> Any:
        return self.kernel[(self.programs,)](*tensors, *self.numbers, **self.options)


def is_watched(kernel: Any) -> bool:
    """Whether someone asked Triton to be told of launches, as profilers do."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks) or bool(kernel.pre_run_hooks)


_launches: dict[Hashable, Launch] = {}


def start_kernel(kernel: Any, programs: int, **arguments: Any) -> None:
    """Runs ``programs`` copies of a kernel; one whose numbers and types were seen before starts at once."""
    values = [arguments[name] for name in kernel.arg_names]
    tensors = [value for value in values if isinstance(value, Tensor)]
    device = tensors[0].device
    key = (
        id(kernel), programs, device, tuple([tensor.dtype for tensor in tensors]), tuple(values[len(tensors) :]),
        *[arguments.get(option) for option in OPTIONS],
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = keep(_launches, key, Launch(kernel, programs, arguments, device))
    launch(*tensors)


def keep(shelf: dict[Hashable, Kept], key: Hashable, made: Kept) -> Kept:
    """Puts what was made on a shelf of bounded size."""
    if len(shelf) >= MOST_KEPT:
        shelf.clear()
    shelf[key] = made
    return made

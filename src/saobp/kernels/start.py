"""Launching a kernel at little cost: Triton's own binding of some fifty arguments takes longer than a short kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saobp.kernels.arithmetic import INTERPRETED

OPTIONS = ("num_warps", "num_stages", "maxnreg")
_compiled: dict[tuple[Any, ...], Any] = {}


def start_kernel(kernel: Any, programs: int, **arguments: Any) -> None:
    """Runs ``programs`` copies of a kernel.

    Triton compiles a kernel for the types of its arguments, the alignment of pointers and some properties of
    whole numbers. A call whose numbers, types and alignments were seen before gets the same binary at once.
    """
    if INTERPRETED:
        kernel[(programs,)](**arguments)
        return
    names = kernel.arg_names
    values = [arguments[name] for name in names]
    key = (
        kernel,
        *[
            (value.dtype, value.device, value.data_ptr() % 16) if isinstance(value, Tensor) else value
            for value in values
        ],
        *[arguments.get(option) for option in OPTIONS],
    )
    ready = _compiled.get(key)
    if ready is None:
        _compiled[key] = kernel[(programs,)](**arguments)
    else:
        ready[(programs, 1, 1)](*values)

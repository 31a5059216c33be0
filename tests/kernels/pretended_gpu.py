"""A GPU for Triton's compiler on a machine without one: kernels are compiled for it, launches are recorded.

Triton's interpreter runs kernels on a CPU but accepts what the compiler does not. Here every kernel of a
call is compiled, down to machine code, with the arguments that the call passes:
``python tests/kernels/pretended_gpu.py CASE``, in a process of its own: Triton chooses its driver once.
Without CASE, cases are read from standard input; each gets a copy of a process that has imported everything.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from reduced_lanes import wrong_reductions
from unset_registers import disassembled, unset_registers

HOPPER = 90


class Launched(NamedTuple):
    """One launch: the kernel's name, its binary, the size of the grid, and its arguments but addresses."""

    name: str
    binary: bytes
    grid: tuple[int, int, int]
    numbers: tuple[Any, ...]


class _Utilities:
    def get_device_properties(self, device: Any) -> dict[str, int]:  # noqa: ARG002
        return {
            "max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536
        }  # fmt: skip

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[str, bytes, int, int, int]:
        is_machine_code = binary.startswith(b"\x7fELF")  # tools/compare_ptx.py stops at PTX
        if is_machine_code and (unset := unset_registers(disassembled(binary))):
            raise AssertionError(f"{name} reads registers that it never wrote: {'; '.join(unset)}")
        return "module", binary, 0, 0, 1024

    def unload_module(self, *_: Any) -> None:
        pass


def pretend_gpu(capability: int = HOPPER) -> list[Launched]:
    """From now on Triton compiles for this compute capability; the list fills with what is launched.

    Kernels in Gluon and direct launches are taken with every version of Triton, known or not.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from saobp.kernels.runtime import launcher

    launcher.LAUNCHES_DIRECTLY = True
    launched: list[Launched] = []

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:  # noqa: ARG002
            self.name, self.arguments = source.fn.__name__, source.fn.arg_names

        def __call__(self, *arguments: Any) -> None:
            x, y, z, _, binary, _, _, _, _, *given = arguments  # then stream, metadata, hooks
            if len(given) != len(self.arguments):
                raise TypeError(f"{self.name} takes {len(self.arguments)} arguments, not {len(given)}")
            numbers = (_number(name, one) for name, one in zip(self.arguments, given, strict=True))
            launched.append(Launched(self.name, binary, (x, y, z), tuple(numbers)))

    class Driver:
        utils = _Utilities()
        launcher_cls = Launcher

        def get_current_device(self) -> None:
            return None

        def get_current_stream(self, device: Any) -> int:  # noqa: ARG002
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_device_interface(self) -> Any:
            return torch.cuda

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

    driver.set_active(Driver())
    torch.cuda.device = nullcontext  # type: ignore[assignment,misc]  # states are on the CPU, which it refuses
    _check_reductions()
    return launched


def _check_reductions() -> None:
    """A kernel with a reduction that Triton compiles wrongly raises."""
    from triton.backends.nvidia.compiler import CUDABackend

    lower = CUDABackend.make_llir

    def checked(self: Any, module: Any, *rest: Any) -> Any:
        if wrong := wrong_reductions(str(module)):
            raise AssertionError(f"Triton reduces these wrongly: {'; '.join(wrong)}")
        return lower(self, module, *rest)

    CUDABackend.make_llir = checked


def _number(name: str, argument: Any) -> Any:
    """An argument without the address in it: those differ from call to call."""
    if hasattr(argument, "strides"):  # a tensor descriptor
        return tuple(argument.shape), tuple(argument.strides)
    return None if name.endswith(("_ptr", "_map")) else argument


def compile_call(
    launched: list[Launched], factor: str, dtype: torch.dtype, length: int, *, heads: int = 2, **options: Any
) -> list[str]:
    """Kernels that a forward pass and, unless ``backward`` is False, a backward pass launch.

    Both run twice, through Triton and then directly.
    """
    from saobp.kernels.fused import fused_attention
    from saobp.refinement import Refinement

    learned, backward = options.pop("learned", False), options.pop("backward", True)
    several = {name: options.pop(name) for name in ("steps", "damping", "message_stride") if name in options}
    query, key, value = (
        torch.zeros(1, length, heads, 64, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    strength = torch.full((heads,), 0.2, requires_grad=learned)
    refinement = Refinement(factor, "learned" if learned else 0.2, **several)
    turns = []
    for _ in range(2):
        launched.clear()
        strongest = None if learned else 0.2
        out = fused_attention(query, key, value, refinement, strength, strongest=strongest, **options)
        if backward:
            out.sum().backward()
        turns.append(list(launched))
    if turns[0] != turns[1]:
        names = [[one.name for one in turn] for turn in turns]
        raise AssertionError(f"the first call launched {names[0]}, the second {names[1]} or other arguments")
    return [one.name for one in turns[0]]


def _padded(length: int, dropout: float = 0.1) -> dict[str, Any]:
    return {"padding_mask": torch.ones(1, length, dtype=torch.bool), "dropout_p": dropout}


def _let_hopper_take_few_heads() -> None:
    from saobp.kernels import dispatch
    from saobp.kernels.hopper import launch

    dispatch.HOPPER_MIN_HEADS = dispatch.WHOLE_MIN_HEADS = dispatch.WHOLE_BACKWARD_MIN_HEADS = 0
    dispatch.CAUSAL_MIN_HEADS = dispatch.CAUSAL_MIN_ENTRIES = dispatch.SUMS_MIN_HEADS = 0
    launch.multiprocessors = lambda _: 132  # type: ignore[assignment]


def compile_hopper(launched: list[Launched]) -> list[str]:
    """As "short", where the kernels for Hopper take calls of any size."""
    _let_hopper_take_few_heads()
    return (
        compile_call(launched, "high", torch.bfloat16, 128)
        + compile_call(launched, "high", torch.bfloat16, 128, learned=True)
        + compile_call(launched, "high-listing", torch.bfloat16, 128)
        + compile_call(launched, "low", torch.bfloat16, 100, **_padded(100))
        + compile_call(launched, "high-key-bias", torch.bfloat16, 100, learned=True, message_stride=4)
    )


def compile_whole_map(launched: list[Launched]) -> list[str]:
    """As "long", where the kernels for Hopper take calls of any size."""
    _let_hopper_take_few_heads()
    return (
        compile_call(launched, "high", torch.bfloat16, 256)
        + compile_call(launched, "high", torch.bfloat16, 256, learned=True)
        + compile_call(launched, "high-key-bias", torch.bfloat16, 200, learned=True)
        + compile_call(launched, "low", torch.bfloat16, 200, learned=True, **_padded(200))
        + compile_call(launched, "low", torch.bfloat16, 200, learned=True, **_padded(200, dropout=0.0))
    )


def compile_joint_sums(launched: list[Launched]) -> list[str]:
    """As "long", where the kernel for Hopper takes calls of any size."""
    _let_hopper_take_few_heads()
    return (
        compile_call(launched, "high", torch.bfloat16, 512, backward=False)
        + compile_call(launched, "high-key-bias", torch.bfloat16, 500, learned=True, backward=False)
        + compile_call(launched, "low", torch.bfloat16, 500, learned=True, backward=False, **_padded(500))
    )


def compile_causal_hopper(launched: list[Launched]) -> list[str]:
    """As "causal", where the kernel for Hopper takes calls of any size."""
    _let_hopper_take_few_heads()
    return (
        compile_call(launched, "high", torch.bfloat16, 256, is_causal=True)
        + compile_call(launched, "high", torch.bfloat16, 1024, is_causal=True, learned=True)
        + compile_call(launched, "low", torch.float16, 200, is_causal=True, learned=True, **_padded(200))
    )


def compile_causal_key_bias(launched: list[Launched]) -> list[str]:
    """Short, with stored gradients, by sweeps, and by those of weak strengths."""
    options = {"is_causal": True, "learned": True}
    return (
        compile_call(launched, "high-key-bias", torch.bfloat16, 128, **options)
        + compile_call(launched, "low-key-bias", torch.float16, 300, **options, **_padded(300))
        + compile_call(launched, "high-key-bias", torch.bfloat16, 1100, **options)
        + compile_call(launched, "high-key-bias", torch.bfloat16, 1100, is_causal=True)
    )


def compile_sweep(launched: list[Launched]) -> list[str]:
    """The sweep for statistics, causal, through Triton and then directly; then masks of single entries."""
    from saobp.kernels.statistics.launch import sweep_rows
    from saobp.propagation.row_statistics import RowMask

    states = [torch.zeros(1, 256, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 2, 2)]
    for _ in range(2):
        sweep_rows(*states, RowMask(causal=True), scale=0.1, first=4)
    first, second = launched
    if first != second:
        raise AssertionError("the second launch has other arguments than the first")
    for kind, width in itertools.product((torch.bfloat16, torch.float32), (24, 64)):
        states = [torch.zeros(1, 35, heads, width, dtype=kind).transpose(1, 2) for heads in (4, 2, 2)]
        for entries in (torch.ones(1, 1, 35, 35, dtype=torch.bool), torch.zeros(1, 4, 35, 35)):
            sweep_rows(*states, RowMask(entries=entries), scale=0.1, first=4)
    return [first.name]


def compile_masked_call(
    launched: list[Launched], dtype: torch.dtype, *, dim: int = 64, **options: Any
) -> list[str]:
    """Kernels that a forward and a backward pass under a window or a mask launch, with learned strengths."""
    from saobp.kernels.masked.attention import masked_attention
    from saobp.refinement import Refinement

    launched.clear()
    states = [torch.zeros(1, 300, 2, dim, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    strength = torch.zeros(2, requires_grad=True)
    masked_attention(*states, Refinement("high", "learned"), strength, **options).sum().backward()
    return [one.name for one in launched]


def compile_masked(launched: list[Launched]) -> list[str]:
    """A window; and everything at once: learned numbers to add and strengths, a window, padding, dropout."""
    mask = torch.zeros(1, 1, 300, 300, dtype=torch.bfloat16, requires_grad=True)
    nodes = torch.ones(1, 1, 300, dtype=torch.bool)
    return (
        compile_masked_call(launched, torch.bfloat16, window=65)
        + compile_masked_call(launched, torch.bfloat16, window=65, is_causal=True)
        + compile_masked_call(launched, torch.float16, window=65, dropout_p=0.1, mask=mask, nodes=nodes)
    )


def compile_masked_float32(launched: list[Launched]) -> list[str]:
    """A causal window in float32. Raises if products that sum up a tile's messages accumulate into the sums
    of the rows before it: every addition would round."""
    from saobp.kernels.masked import backward, forward

    names = compile_masked_call(launched, torch.float32, dim=16, window=65, is_causal=True)
    for kernel in (
        forward.masked_output,
        backward.masked_value_gradient,
        backward.masked_query_gradient,
        backward.masked_key_gradient,
    ):
        for kernels, *_ in kernel.device_caches.values():
            for compiled in kernels.values():
                starts = tile_product_starts(compiled.asm["ttir"])  # messages first, then their gradients
                if len(starts) < 2 or any(start != 0.0 for start in starts[:2]):
                    raise AssertionError(f"{kernel.__name__} sums messages in products from {starts}, not 0")
    return names


def tile_product_starts(text: str) -> list[float | None]:
    """What products of two square tiles in a kernel's TTIR start from: a constant, or None for all else."""
    constants = re.findall(r"(%\w+) = arith\.constant dense<([-+.\de]+)> : tensor<\w+xf32>", text)
    values = {name: float(value) for name, value in constants}
    products = r"tt\.dot %\w+, %\w+, (%\w+)[^:]* : tensor<(\d+)x\2xf32> \* tensor<\2x\2xf32>"
    return [values.get(start) for start, _ in re.findall(products, text)]


def compile_step(launched: list[Launched]) -> list[str]:
    """A decoding step and the next one, whose cache has a key more: nothing is compiled for it."""
    from saobp.kernels.decoding import launch

    launch.multiprocessors = lambda _: 132  # type: ignore[assignment]
    names = []
    for dtype in (torch.bfloat16, torch.float32):
        launched.clear()
        query, strength = torch.zeros(1, 4, 1, 128, dtype=dtype), torch.zeros(4)
        totals = None
        for keys in (300, 301):
            states = torch.zeros(1, 2, keys, 128, dtype=dtype)
            marks = torch.ones(1, keys, dtype=torch.bool)
            _, totals = launch.decoding_step(query, states, states, strength, totals, marks, 0.1, 1.0)
        first, second = launched[:2], launched[2:]
        if [one.binary for one in first] != [one.binary for one in second]:
            raise AssertionError("the second step was compiled anew")
        names += [one.name for one in first]
        launched.clear()
        states = torch.zeros(1, 2, 300, 136, dtype=dtype)[..., 4:132]  # asynchronous copies need 16 bytes
        launch.decoding_step(query, states, states, strength, None, None, 0.1, 1.0)
        if [one.name for one in launched] != [one.name for one in first]:
            raise AssertionError("states that are not aligned take other kernels")
    return names


CASES: dict[str, Callable[[list[Launched]], list[str]]] = {
    "short": lambda launched: (
        compile_call(launched, "high", torch.bfloat16, 128)
        + compile_call(launched, "low", torch.bfloat16, 100, **_padded(100))
        + compile_call(launched, "high", torch.float16, 100, learned=True, **_padded(100))
    ),
    "hopper": compile_hopper,
    "whole map": compile_whole_map,
    "joint sums": compile_joint_sums,
    "causal hopper": compile_causal_hopper,
    "long": lambda launched: (
        compile_call(launched, "high", torch.bfloat16, 512)
        + compile_call(launched, "low", torch.float16, 300, learned=True, **_padded(300))
    ),
    "key bias": lambda launched: (
        compile_call(launched, "high-key-bias", torch.bfloat16, 512, learned=True, message_stride=4)
        + compile_call(
            launched, "low-key-bias", torch.float16, 300, learned=True, message_stride=2, **_padded(300)
        )
    ),
    "causal": lambda launched: (
        compile_call(launched, "high", torch.bfloat16, 512, is_causal=True)
        + compile_call(launched, "high", torch.bfloat16, 8192, heads=4, is_causal=True)  # by TMA
    ),
    "short causal": lambda launched: (
        compile_call(launched, "high", torch.bfloat16, 128, is_causal=True)
        + compile_call(launched, "low", torch.float16, 100, is_causal=True, learned=True, **_padded(100))
        + compile_call(launched, "high-listing", torch.bfloat16, 30, is_causal=True)
    ),
    "causal key bias": compile_causal_key_bias,
    "masked": compile_masked,
    "masked float32": compile_masked_float32,
    "statistics": compile_sweep,
    "decoding": compile_step,
    "elemmul": lambda launched: compile_call(launched, "elemmul", torch.float16, 256),
    "steps": lambda launched: (
        compile_call(launched, "high", torch.bfloat16, 512, steps=2)
        + compile_call(launched, "high", torch.float16, 300, steps=2, learned=True, **_padded(300))
        + compile_call(launched, "low", torch.float32, 100, steps=3, damping=0.3, learned=True)
    ),
    "short steps": lambda launched: (
        compile_call(launched, "high", torch.bfloat16, 128, steps=2)
        + compile_call(
            launched, "low", torch.float16, 100, steps=3, damping=0.3, learned=True, **_padded(100)
        )
    ),
}


def serve_cases() -> None:
    """For each line of standard input one of JSON: the kernels that the case launched and what went wrong."""
    import torch._dynamo  # noqa: F401

    import saobp.kernels.fused  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.alarm(600)
            names, error = [], ""
            try:
                names = CASES[line.strip()](pretend_gpu())
            except BaseException:
                error = traceback.format_exc()
            print(json.dumps([names, error]), flush=True)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            print(
                json.dumps([[], f"the compiler ended with {os.waitstatus_to_exitcode(status)}"]), flush=True
            )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve_cases()
    elif len(sys.argv) == 2 and sys.argv[1] in CASES:
        print(" ".join(CASES[sys.argv[1]](pretend_gpu())))
    else:
        sys.exit(f"name one family of kernels: {', '.join(CASES)}")

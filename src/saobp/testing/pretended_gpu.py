"""Triton with a pretended GPU: kernels are compiled for one, launches are noted and do nothing.

Triton's interpreter runs kernels on a CPU but forgives what a compiler does not. Here every kernel of a call
goes through the real compiler, down to machine code, with the arguments that the call really passes. As
``python -m saobp.testing.pretended_gpu CASE`` in a process of its own, because a driver is chosen once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

HOPPER = 90


class _Utilities:
    def get_device_properties(self, device: Any) -> dict[str, int]:  # noqa: ARG002
        return {
            "max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536
        }  # fmt: skip

    def load_binary(self, name: str, *_: Any) -> tuple[str, str, int, int, int]:
        return "module", name, 0, 0, 1024

    def unload_module(self, *_: Any) -> None:
        pass


def pretend_gpu(capability: int = HOPPER) -> list[str]:
    """From now on Triton compiles for such a GPU; the list fills with the names of launched kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    launched: list[str] = []

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:  # noqa: ARG002
            self.name = source.fn.__name__
            self.parameters = len(source.fn.params)

        def __call__(self, *arguments: Any) -> None:
            given = len(arguments) - 9  # grid, stream, function, metadata, hooks
            if given != self.parameters:
                raise TypeError(f"{self.name} takes {self.parameters} arguments, not {given}")
            launched.append(self.name)

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
    return launched


def compile_call(
    launched: list[str], factor: str, dtype: torch.dtype, length: int, **options: Any
) -> list[str]:
    """Kernels that a forward and a backward pass launch; both are done twice, by Triton and then directly."""
    from saobp.kernels.dispatch import fused_attention
    from saobp.refinement import Refinement

    learned = options.pop("learned", False)
    query, key, value = (
        torch.zeros(1, length, 2, 64, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    strength = torch.full((2,), 0.2, requires_grad=learned)
    refinement = Refinement(factor, "learned" if learned else 0.2)
    turns = []
    for _ in range(2):
        launched.clear()
        strongest = None if learned else 0.2
        out = fused_attention(query, key, value, refinement, strength, strongest=strongest, **options)
        out.sum().backward()
        turns.append(list(launched))
    if turns[0] != turns[1]:
        raise AssertionError(f"the first call launched {turns[0]}, the second {turns[1]}")
    return turns[0]


def _padded(length: int) -> dict[str, Any]:
    return {"padding_mask": torch.ones(1, length, dtype=torch.bool), "dropout_p": 0.1}


def compile_hopper(launched: list[str]) -> list[str]:
    """As "short", where the kernel for Hopper takes calls of any size."""
    from saobp.kernels.hopper import launch as short_hopper_launch

    short_hopper_launch.HOPPER_FROM = 0
    return (
        compile_call(launched, "high", torch.bfloat16, 128)
        + compile_call(launched, "high-listing", torch.bfloat16, 128)
        + compile_call(launched, "low", torch.bfloat16, 100, **_padded(100))
    )


CASES: dict[str, Callable[[list[str]], list[str]]] = {
    "short": lambda launched: (
        compile_call(launched, "high", torch.bfloat16, 128)
        + compile_call(launched, "low", torch.bfloat16, 100, **_padded(100))
        + compile_call(launched, "high", torch.float16, 100, learned=True, **_padded(100))
    ),
    "hopper": compile_hopper,
    "long": lambda launched: (
        compile_call(launched, "high", torch.bfloat16, 512)
        + compile_call(launched, "low", torch.float16, 300, learned=True, **_padded(300))
    ),
    "causal": lambda launched: (
        compile_call(launched, "high", torch.bfloat16, 512, is_causal=True)
        + compile_call(launched, "high", torch.bfloat16, 8192, is_causal=True)  # by the copy engine
    ),
    "short causal": lambda launched: (
        compile_call(launched, "high", torch.bfloat16, 128, is_causal=True)
        + compile_call(launched, "low", torch.float16, 100, is_causal=True, learned=True, **_padded(100))
        + compile_call(launched, "high-listing", torch.bfloat16, 30, is_causal=True)
    ),
    "elemmul": lambda launched: compile_call(launched, "elemmul", torch.float16, 256),
}


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in CASES:
        sys.exit(f"name one family of kernels: {', '.join(CASES)}")
    print(" ".join(CASES[sys.argv[1]](pretend_gpu())))

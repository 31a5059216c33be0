"""Causal ElemMul in chunks of rows: times beside whole maps', and what a GPU would compute and move.

    OMP_NUM_THREADS=1 python benchmarks/causal_elemmul.py   on a CPU, a minute: float32, 8 heads of 64
    python benchmarks/causal_elemmul.py --device cuda       CUDA graphs: bfloat16, 256 heads of 64
    python benchmarks/causal_elemmul.py --count             the second without a GPU, by count

Seed 0; on a CPU the processor's time. Forward is without gradients. Bytes are those that PyTorch's
operations read and write, as if nothing stayed in a cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import saobp
from saobp.kernels import dispatch
from saobp.kernels.elemmul import causal
from saobp.timing import captured, cuda_clock, processor_clock

DIM, MAP_ENTRIES = 64, 1 << 24
NO_DATA = {
    *("view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "split", "unsqueeze", "alias"),
    *("as_strided", "diagonal", "empty", "new_empty", "empty_like", "detach", "permute"),
}
"""Operations that neither read nor write numbers."""


def milliseconds(call: Callable[[], object], turns: int, device: str) -> float:
    """The median: processor time, or time of a CUDA graph."""
    if device == "cuda":
        replay = captured(call)
        return statistics.median(cuda_clock(replay, 1) for _ in range(turns))
    call()
    return statistics.median(processor_clock(call, 1) for _ in range(turns))


def timed(length: int, heads: int, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (1, length, heads, DIM)
    query, key, value, grad = (
        torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)
    )
    leaves = [one.clone().requires_grad_() for one in (query, key, value)]
    turns = max(1, min(15, MAP_ENTRIES // (heads * length**2)))

    def output(states: list[Tensor], backend: Any) -> Tensor:
        return saobp.attention(*states, "elemmul", is_causal=True, backend=backend)

    def forward() -> float:
        with torch.no_grad():
            return milliseconds(lambda: output([query, key, value], "auto"), turns, device)

    def both(backend: str) -> float:
        return milliseconds(lambda: torch.autograd.grad(output(leaves, backend), leaves, grad), turns, device)

    new, new_both, whole_both = forward(), both("auto"), both("reference")
    with patch.object(dispatch, "chunk_obstacle", lambda _: "the whole map is timed"):
        whole = forward()
    print(f"| {length} | {whole:.1f} | {new:.1f} | {whole_both:.1f} | {new_both:.1f} |", flush=True)


class Count(TorchDispatchMode):
    """Launches, bytes read and written, and operations of products, by whether tensor cores take them."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0
        self.operations = {True: 0, False: 0}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = function(*args, **(kwargs or {})), function.__name__.split(".")[0]
        if name in NO_DATA or not isinstance(result, Tensor | list | tuple):
            return result
        flat = [one for arg in (*args, result) for one in (arg if isinstance(arg, list | tuple) else [arg])]
        tensors = [one for one in flat if isinstance(one, Tensor)]
        if name in ("zeros_like", "new_zeros", "new_ones", "fill_", "copy_"):
            tensors = tensors[1:]
        self.launches += 1
        self.bytes += sum(one.numel() * one.element_size() for one in tensors)
        if "bmm" in name:
            left, right = [one for one in args if isinstance(one, Tensor)][-2:]
            self.operations[left.element_size() == 2] += 2 * left.numel() * right.shape[2]
        return result

    def __str__(self) -> str:
        half, single = (number / 1e9 for number in (self.operations[True], self.operations[False]))
        return f"{self.launches} | {self.bytes / 1e9:.1f} | {half:.0f} | {single:.0f} |"


def counted(length: int, heads: int, states: torch.dtype, maps: torch.dtype) -> None:
    """As on a GPU, with tensors that have no numbers."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left, right, **({"out_dtype": torch.float32} if left.element_size() == 2 else {}))

    shape = (1, heads, length, DIM)
    query, key, value, grad = (torch.empty(shape, dtype=states, device="meta") for _ in range(4))
    with (
        patch.object(causal, "map_type", lambda _: maps),
        patch.object(causal, "ROWS", causal.GPU_ROWS),
        patch.object(causal, "_product", product),
    ):
        with Count() as forward:
            _, sums = causal.causal_elemmul(query, key, value, None, DIM**-0.5)
        with Count() as backward:
            causal.causal_elemmul_gradients(grad, query, key, value, None, sums, DIM**-0.5)
    for name, count in (("forward", forward), ("backward", backward)):
        print(f"| {length} | {str(states).removeprefix('torch.')} | {name} | {count}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--heads", type=int, help="8 on a CPU, else 256")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--count", action="store_true")
    options = parser.parse_args()
    heads = options.heads or (8 if options.device == "cpu" and not options.count else 256)
    torch.manual_seed(0)
    if options.count:
        print("| tokens | states | pass | launches | GB | GFLOP bfloat16 | GFLOP float32 |")
        print("|---|---|---|---|---|---|---|")
        for length in options.lengths or [1024]:
            counted(length, heads, torch.bfloat16, torch.bfloat16)
            counted(length, heads, torch.float16, torch.float32)
        return
    print("| tokens | forward, whole map, ms | chunks | forward + backward, reference | chunks |")
    print("|---|---|---|---|---|")
    for length in options.lengths or [128, 256, 512, 1024, 2048]:
        timed(length, heads, options.device)


if __name__ == "__main__":
    main()

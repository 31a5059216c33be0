"""Several steps of propagation over one: times as CUDA graphs, and memory that a call adds to the peak.

    python benchmarks/several_steps.py --out FOLDER               on a GPU, half a minute or so
    python benchmarks/several_steps.py --device cpu --backend reference --lengths 16 --rows 64

bfloat16, 8 heads of 64, 262,144 rows, states laid out as in a model, strength 0.2: learned, and fixed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.arguments import BoundedStrength
from saobp.runs.machine import machine
from saobp.storage.atomic import write_atomically
from saobp.timing import added_memory, captured, cuda_clock, wall_clock

HEADS, DIM, STRENGTH, TURNS = 8, 64, 0.2, 20


def milliseconds(call: Callable[[], object], on_gpu: bool) -> float:
    """On a GPU the median of replays of a CUDA graph, else the time of one call."""
    for _ in range(3):
        call()
    if not on_gpu:
        return wall_clock(call, 1)
    replay = captured(call)
    return statistics.median(cuda_clock(replay, 1) for _ in range(TURNS))


def measured(
    length: int, steps: int, learned: bool, options: argparse.Namespace
) -> tuple[float, float, float]:
    """Milliseconds forward, and with the backward pass, and MiB that the latter adds to the peak."""
    on_gpu = options.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shape = (options.rows // HEADS // length, length, HEADS, DIM)

    def states() -> Tensor:
        return torch.randn(shape, device=options.device, dtype=dtype).transpose(1, 2)

    query, key, value, grad = (states() for _ in range(4))
    strength = torch.full((HEADS,), STRENGTH, device=options.device, requires_grad=learned)
    given = strength if learned else BoundedStrength(strength, STRENGTH)
    refinement = Refinement("high", STRENGTH, steps=steps)

    def forward() -> Tensor:
        return saobp.attention(query, key, value, refinement, strength=given, backend=options.backend)

    with torch.no_grad():
        only = milliseconds(forward, on_gpu)
    leaves = [one.requires_grad_() for one in (query, key, value)] + [strength] * learned

    def both() -> None:
        torch.autograd.grad(forward(), leaves, grad)

    added = added_memory(both) if on_gpu else 0.0
    return only, milliseconds(both, on_gpu), added


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for steps.md")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="fused", choices=("fused", "reference"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--rows", type=int, default=262_144, help="rows of all heads of a call")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    lines = ["| tokens | strength | pass | one step, ms | several, ms | over one | MiB, one | MiB, several |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for length in options.lengths:
        for learned in (True, False):
            one = measured(length, 1, learned, options)
            several = measured(length, options.steps, learned, options)
            kind = "learned" if learned else f"fixed {STRENGTH}"
            for place, name in enumerate(("forward", "forward + backward")):
                memory = f"{one[2]:.0f} | {several[2]:.0f}" if place else "|"
                times = f"{one[place]:.3f} | {several[place]:.3f} | {several[place] / one[place]:.2f}"
                lines.append(f"| {length} | {kind} | {name} | {times} | {memory} |")
                print(lines[-1], flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        facts = "\n".join(f"- {name}: {fact}" for name, fact in machine(options.device).items())
        title = f"# {options.steps} steps over one, {options.backend}\n\n"
        write_atomically(options.out / "steps.md", title + facts + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

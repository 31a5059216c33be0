"""Errors of the fused kernels in heads whose rows put nearly all weight on one key.

    python benchmarks/sharp_rows.py                          on a GPU
    TRITON_INTERPRET=1 python benchmarks/sharp_rows.py       without one, in about two minutes

Normal queries and keys times --spread, so scores have a standard deviation of its square. Strengths count as
trained, so the dispatcher does not know them. Each number is a largest error over the largest entry of the
right result, both against float64; in brackets that of the reference path in the same precision.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import saobp
from saobp import Refinement

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = ((1, 3.0), (1, 8.0), (2, 2.0), (2, 3.0), (2, 6.0), (3, 6.0))
"""Steps and strength."""
NAMES = ("output", "dQ", "dK", "dV", "d strength")


def errors(steps: int, strength: float, dtype: torch.dtype, length: int, spread: float, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    states = [
        (torch.randn(1, heads, length, 8, generator=generator) * scale).to(DEVICE, dtype)
        for heads, scale in ((2, spread), (1, spread), (1, 1.0))
    ]
    refinement = Refinement("high", strength, steps=steps)

    def results(backend: str, kind: torch.dtype) -> list[Tensor]:
        leaves = [state.to(kind).requires_grad_() for state in states]
        own = torch.full((2,), strength, device=DEVICE, requires_grad=True)
        output = saobp.attention(*leaves, refinement, backend=backend, strength=own)  # type: ignore[arg-type]
        weights = torch.arange(output.numel(), device=DEVICE).sin().view(output.shape).to(output)
        return [output, *torch.autograd.grad((output * weights).sum(), [*leaves, own])]

    right = results("reference", torch.float64)
    cells = []
    for name, fused, plain, exact in zip(
        NAMES, results("fused", dtype), results("reference", dtype), right, strict=True
    ):
        largest = exact.abs().max()
        ratios = [((found.double() - exact).abs().max() / largest).item() for found in (fused, plain)]
        cells.append(f"{name} {ratios[0]:.0e} ({ratios[1]:.0e})")
    return ", ".join(cells)


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--length", type=int, default=140)
    parser.add_argument("--spread", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for dtype in (torch.float16, torch.float32):
        for steps, strength in CASES:
            found = errors(steps, strength, dtype, given.length, given.spread, given.seed)
            print(f"{dtype}, {steps} steps, strength {strength:g}: {found}", flush=True)

"""Exact GTD per second against the naive sum of powers.

python benchmarks/metrics_gtd.py
python benchmarks/metrics_gtd.py --device cuda --maps 1024
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from saobp import metrics


def naive(attention: Tensor) -> Tensor:
    paths = sum(0.9 ** (t - 1) * torch.linalg.matrix_power(attention, t) for t in range(2, 5))
    indirect = paths.square().sum((-2, -1))
    return indirect / (attention.square().sum((-2, -1)) + indirect)


def per_second(call: Callable[[Tensor], Tensor], attention: Tensor, repeats: int) -> float:
    call(attention)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call(attention).sum().item()
        best = min(best, time.perf_counter() - start)
    return len(attention) / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--maps", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(
        f"{options.device}, {torch.get_num_threads()} threads, torch {torch.__version__}, {options.maps} maps"
    )
    print("length   maps/s   naive maps/s   ratio   largest difference")
    for length in options.lengths:
        attention = torch.randn(options.maps, length, length, device=options.device).mul(2).softmax(-1)
        ours, theirs = (per_second(call, attention, options.repeats) for call in (metrics.gtd, naive))
        difference = float((metrics.gtd(attention) - naive(attention)).abs().max())
        print(f"{length:6d} {ours:8.0f} {theirs:14.0f} {ours / theirs:7.2f} {difference:20.1e}")


if __name__ == "__main__":
    main()

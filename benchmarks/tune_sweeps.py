"""Find tile sizes for the sweeps on this GPU: python benchmarks/tune_sweeps.py --sweeps row_sums

Compiles every candidate in parallel processes (Triton's disk cache is shared), then times them one by
one inside the whole forward or forward + backward, each against scaled_dot_product_attention.
With --message-stride above 1 the sweeps are those of a key bias with learned strengths.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from types import ModuleType

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from saobp.kernels.bidirectional.launch import LONG
from saobp.kernels.call_spec import Block
from saobp.kernels.key_bias.launch import KEY_BIAS
from saobp.kernels.runtime.family import KernelFamily

FORWARD = ("row_sums", "column_messages", "refined_output", "biased_output")


def family_of(stride: int) -> KernelFamily:
    return LONG if stride == 1 else KEY_BIAS


def module_of(stride: int) -> ModuleType:
    """Where the family's ``sweep_block`` is."""
    return sys.modules[family_of(stride).plan_forward.__module__]


def states(batch: int, heads: int, length: int, dim: int) -> list[torch.Tensor]:
    shape = (batch, length, heads, dim)
    make = lambda: torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)  # noqa: E731
    return [make().requires_grad_() for _ in range(3)] + [make()]


def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stride: int) -> torch.Tensor:
    strength = torch.full((query.shape[1],), 0.2, device="cuda")
    length, dim = query.shape[2:]
    receives, bound = (1, 0.18) if stride == 1 else (2, 0.0)
    numbers = (length, dim**-0.5, 0.0, 1.0, receives, bound, 1, 0.0, stride)
    return family_of(stride)(query, key, value, strength, None, None, None, *numbers)


def once(arguments: tuple) -> str | None:
    """Compile one candidate by running it once; returns the error."""
    sweep, block, shape, stride = arguments
    launch = module_of(stride)
    plain = launch.sweep_block
    launch.sweep_block = lambda spec, name: block if name == sweep else plain(spec, name)
    family_of(stride).plans.clear()
    try:
        q, k, v, g = states(1, 1, shape[2], shape[3])
        out = fused(q, k, v, stride)
        if sweep not in FORWARD:
            out.backward(g)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    return None


def milliseconds(call) -> float:
    return triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median")


def sdpa_times(q, k, v, g) -> tuple[float, float, str]:
    """Fastest backend's forward and forward + backward."""
    best: dict[str, tuple[float, float]] = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            with torch.no_grad():
                forward = milliseconds(lambda: scaled_dot_product_attention(q, k, v))
            both = milliseconds(
                lambda: torch.autograd.grad(scaled_dot_product_attention(q, k, v), (q, k, v), g)
            )
        best[backend.name] = (forward, both)
        print(f"  sdpa {backend.name}: forward {forward:.3f} ms, forward + backward {both:.3f} ms")
    name = min(best, key=lambda n: best[n][0])
    return best[name][0], min(t[1] for t in best.values()), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", nargs="+", required=True)
    parser.add_argument(
        "--shape", nargs=4, type=int, default=[4, 16, 4096, 64], help="batch heads length dim"
    )
    parser.add_argument("--sides", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--warps", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--message-stride", type=int, default=1)
    options = parser.parse_args()
    stride, launch = options.message_stride, module_of(options.message_stride)
    shape = tuple(options.shape)
    grid = itertools.product(options.sides, options.sides, options.warps, options.stages)
    candidates = [(s, Block(r, k, w, n), shape, stride) for r, k, w, n in grid for s in options.sweeps]
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        failures = dict(
            zip([c[:2] for c in candidates], pool.map(once, candidates, chunksize=1), strict=True)
        )
    q, k, v, g = states(*shape)
    sdpa_forward, sdpa_both, name = sdpa_times(q, k, v, g)
    print(
        f"{torch.cuda.get_device_name()}, {shape}, bfloat16; "
        f"sdpa ({name}) {sdpa_forward:.3f} / {sdpa_both:.3f} ms"
    )
    plain = launch.sweep_block
    results = []
    for sweep, block, *_ in candidates:
        if failures[sweep, block]:
            continue
        launch.sweep_block = lambda spec, n, s=sweep, b=block: b if n == s else plain(spec, n)
        family_of(stride).plans.clear()
        if sweep not in FORWARD:
            time = milliseconds(lambda: torch.autograd.grad(fused(q, k, v, stride), (q, k, v), g))
            results.append((sweep, time / sdpa_both, time, block))
        else:
            with torch.no_grad():
                time = milliseconds(lambda: fused(q, k, v, stride))
            results.append((sweep, time / sdpa_forward, time, block))
    launch.sweep_block = plain
    for sweep in options.sweeps:
        for _, ratio, time, block in sorted(r for r in results if r[0] == sweep)[:8]:
            print(f"{sweep:16} {ratio:.3f}x {time:.3f} ms  {block}")
    broken = {k: v for k, v in failures.items() if v}
    print(f"{len(broken)} of {len(candidates)} candidates do not compile", list(broken.items())[:2])


if __name__ == "__main__":
    main()

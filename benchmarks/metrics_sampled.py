"""The sampled statistics against the exact ones and against plain attention: time and memory over length.

    python benchmarks/metrics_sampled.py --lengths 512 1024 2048          on a CPU, under a minute
    python benchmarks/metrics_sampled.py --device cuda --lengths 1024 4096 32768 --heads 16

Prints for each length the time of one attention forward (scaled_dot_product_attention), of the sampled and
the exact method, how many forwards the sampled method costs, peak memory beyond the inputs, and the largest
standard error of GTD. The exact method is left out beyond --exact-up-to.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from multiprocessing import get_context

import torch
from torch.nn.functional import scaled_dot_product_attention

from saobp import Refinement, metrics
from saobp.metrics.sampled import SAMPLED


def timed(call: Callable[[], object], device: str, repeats: int) -> tuple[float, float]:
    """Best seconds of several calls, and MiB of memory beyond what was there before."""
    call()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return best, memory / 2**20


def case(length: int, what: str, options: argparse.Namespace, results) -> None:  # type: ignore[no-untyped-def]
    """One measurement in a process of its own, so that a CPU's peak memory belongs to it."""
    torch.manual_seed(0)
    kind = getattr(torch, options.dtype)
    shape = (1, options.heads, length, options.dim)
    query, key, value = (torch.randn(shape, device=options.device, dtype=kind) for _ in range(3))
    refinement = Refinement.parse(options.refinement)
    calls: dict[str, Callable[[], object]] = {
        "attention": lambda: scaled_dot_product_attention(query, key, value, is_causal=options.causal),
        "sampled": lambda: metrics.measure(
            query, key, refinement=refinement, method="sampled", is_causal=options.causal
        ),
        "exact": lambda: metrics.measure(
            query, key, refinement=refinement, statistics=SAMPLED, is_causal=options.causal
        ),
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, memory = timed(calls[what], options.device, options.repeats)
    if options.device != "cuda":
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    found = calls[what]()
    error = float(found["gtd"].standard_error.max()) if isinstance(found, dict) else 0.0
    results.put((seconds, memory, error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on cuda, float32 on cpu")
    parser.add_argument("--refinement", default="none")
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--exact-up-to", type=int, default=2048)
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.causal = not options.full
    name = (
        torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    )
    print(
        f"{name}, torch {torch.__version__}, {options.dtype}, {options.heads} heads of {options.dim},",
        end=" ",
    )
    print(f"{'causal' if options.causal else 'full'}, refinement {options.refinement}")
    print("length   attention ms   sampled ms  forwards  sampled MiB  error of GTD   exact ms  exact MiB")
    context = get_context("spawn")
    for length in options.lengths:
        row = {}
        for what in ("attention", "sampled", "exact"):
            if what == "exact" and length > options.exact_up_to:
                row[what] = (float("nan"),) * 3
                continue
            results = context.Queue()
            worker = context.Process(target=case, args=(length, what, options, results))
            worker.start()
            row[what] = results.get()
            worker.join()
        base, sampled, exact = row["attention"], row["sampled"], row["exact"]
        print(
            f"{length:6d} {1e3 * base[0]:14.2f} {1e3 * sampled[0]:12.2f} {sampled[0] / base[0]:9.1f}"
            f" {sampled[1]:12.0f} {sampled[2]:13.4f} {1e3 * exact[0]:10.2f} {exact[1]:10.0f}"
        )


if __name__ == "__main__":
    main()

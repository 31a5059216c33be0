"""Cost of the fast tier in Llama models of random weights: in a forward, and in a training step.

    python benchmarks/watch.py --out FOLDER                          on a GPU, two minutes or so
    python benchmarks/watch.py --device cpu --shapes tiny --lengths 256 --turns 3

Weights and optimiser states (AdamW) are bfloat16, attention is PyTorch's SDPA, nothing is compiled. A forward
is that of the layers alone, without the head over the vocabulary, so that the sweep's share is the largest;
every forward is watched. A step has the head and the loss; its cost is the extra time of a watched step
spread over --every steps. Memory is what a watched forward adds to the peak of a plain one, and what the
sweep of one layer needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from saobp.benchmarking.table import BenchmarkTable, Cell, milliseconds
from saobp.metrics.fast.fast_statistics import fast_statistics
from saobp.metrics.fast.monitor import Monitor
from saobp.runs.machine import machine
from saobp.timing import Timing, in_turn, wall_clock

SHAPES = {
    "tiny": (2, 64, 4, 2, 128, 1000, 2),
    "135M": (30, 576, 9, 3, 1536, 49_152, 30),
    "1B": (16, 2048, 32, 8, 8192, 128_256, 16),
    "8B": (32, 4096, 32, 8, 14_336, 128_256, 6),
}
"""Layers, width, heads, key heads, inner width, vocabulary, and the layers that are timed."""


def llama(name: str, length: int, device: str) -> LlamaForCausalLM:
    _, width, heads, key_heads, inner, vocabulary, timed = SHAPES[name]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=timed,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        max_position_embeddings=length,
        tie_word_embeddings=name != "8B",
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def cost(name: str, length: int, options: argparse.Namespace) -> dict[str, Cell]:
    """One row: times of a forward and a training step, plain and watched, and memory."""
    device, batch = options.device, max(1, options.tokens // length)
    model = llama(name, length, device)
    vocabulary = SHAPES[name][5]
    ids = torch.randint(0, vocabulary, (batch, length), device=device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    monitor = Monitor(model)

    def forward() -> None:
        with torch.no_grad():
            model.model(ids)

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    def watched(call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with monitor.measuring():
                call()
            monitor.health.reset()

        return run

    calls = {
        "forward": forward,
        "watched forward": watched(forward),
        "step": step,
        "watched step": watched(step),
    }
    found = {}
    for pair in (("forward", "watched forward"), ("step", "watched step")):
        found |= in_turn(
            {way: calls[way] for way in pair}, turns=options.turns, budget=options.budget, clock=clock(device)
        )
    times = {way: timing for way, timing in found.items() if isinstance(timing, Timing)}
    if len(times) < len(calls):
        return {"model": name, "tokens": f"{batch} x {length}", "problem": str(found)}
    memory = {way: peak(calls[way], device) for way in ("forward", "watched forward")}
    forward_share = times["watched forward"].over(times["forward"]) - 1
    step_share = (times["watched step"].over(times["step"]) - 1) / options.every
    return {
        "model": name,
        "layers timed": f"{SHAPES[name][6]} of {SHAPES[name][0]}",
        "tokens": f"{batch} x {length}",
        "forward ms": times["forward"].median,
        "always watched, + %": 100 * forward_share,
        "step ms": times["step"].median,
        f"watched every {options.every} steps, + %": 100 * step_share,
        "forward adds MiB": (memory["watched forward"] - memory["forward"]) / 2**20,
        **alone(name, batch, length, options),
    }


def clock(device: str) -> Callable[[Callable[[], object], int], float]:
    def timed(call: Callable[[], object], count: int) -> float:
        def run() -> None:
            call()
            if device == "cuda":
                torch.cuda.synchronize()

        return wall_clock(run, count)

    return timed


def peak(call: Callable[[], object], device: str) -> int:
    """Peak bytes of a call on a GPU."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def alone(name: str, batch: int, length: int, options: argparse.Namespace) -> dict[str, Cell]:
    """The sweep of one layer by itself: milliseconds beside those of SDPA, and memory beside its states."""
    _, width, heads, key_heads, *_ = SHAPES[name]
    query, key, value = (
        torch.randn(
            batch, length, count, width // heads, device=options.device, dtype=torch.bfloat16
        ).transpose(1, 2)
        for count in (heads, key_heads, key_heads)
    )
    calls = {
        "sweep": lambda: fast_statistics(query, key, value, is_causal=True),
        "SDPA": lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
    }
    found = in_turn(calls, turns=options.turns, budget=options.budget / 4, clock=clock(options.device))
    cells = {f"{way} of a layer ms": milliseconds(timing) for way, timing in found.items()}
    before = torch.cuda.memory_allocated() if options.device == "cuda" else 0
    return cells | {"sweep of a layer MiB": (peak(calls["sweep"], options.device) - before) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135M", "1B", "8B"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a batch")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of one call over all turns")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    title = "The fast tier in Llama models: largest logits, sinks and entropy of every head"
    table = BenchmarkTable("watch", title, machine(options.device))
    for name in options.shapes:
        for length in options.lengths:
            table.rows.append(cost(name, length, options))
            if options.device == "cuda":
                torch.cuda.empty_cache()
            if options.out is not None:
                table.write(options.out)
    table.show(Console())


if __name__ == "__main__":
    main()

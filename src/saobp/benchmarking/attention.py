"""The operation alone: fused kernels against PyTorch's attention and the reference, eager and compiled."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from saobp.arguments import BoundedStrength
from saobp.benchmarking.table import BenchmarkTable, Cell, milliseconds, ratio, spread
from saobp.functional import Backend, attention
from saobp.refinement import Refinement
from saobp.runs.machine import machine
from saobp.timing import Call, Failure, Result, Timing, added_memory, clock_of, in_turn

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPILED = (2048, 8192)
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HEADS, DIM, ROWS = 16, 64, 1 << 18
"""Heads, head size, and about how many rows (batch x heads x length) each measurement has."""
REPLAYED = 1024
"""Up to this length calls are replayed as a CUDA graph, because launch overhead would dominate."""
_MAPS = {"forward": 6, "forward + backward": 11}
"""Float32 maps that the eager reference holds at once."""
STRENGTH = 0.2
REFINEMENT = Refinement("high", STRENGTH)
LEARNED = {"learned": Refinement("high", "learned"), "key bias": Refinement("high-key-bias", "learned")}
"""Refinements with learned strengths, from 0.05 to 4 over the heads, which nothing is known of beforehand."""

Attend = Callable[..., Tensor]


def attention_speed(
    *,
    device: str = "cuda",
    lengths: Sequence[int] = LENGTHS,
    compiled: Sequence[int] = COMPILED,
    rows: int = ROWS,
    heads: int = HEADS,
    turns: int,
    budget: float,
    notify: Callable[[str], None] = print,
    save: Callable[[BenchmarkTable], object] = lambda _: None,
) -> BenchmarkTable:
    """Forward, and forward + backward, bidirectional and causal, one row of the table for each length."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    title = f"Refined attention against PyTorch's, {dtype}, head size {DIM}"
    table = BenchmarkTable("attention", title, machine(device))
    table.notes.append(
        f"Milliseconds, medians of {turns} turns in which every version runs once. 'fused' is `high` with "
        f"strength {STRENGTH}; 'learned' and 'key bias' are `high` and `high-key-bias` with learned "
        f"strengths of 0.05 to 4, and their gradients. About {rows} rows (batch x heads x length) each. "
        f"Up to length {REPLAYED} a CUDA graph is replayed. 'sdpa' is the fastest of PyTorch's backends, "
        "named in its column; FlashAttention 3 and 4 have columns where they are installed. The reference "
        "is left out where its maps do not fit. 'again' is the fused version timed a second time, over the "
        "first: the noise of a ratio."
    )
    for causal in (False, True):
        for length in lengths:
            shape = max(1, rows // (heads * length)), heads, length, DIM
            for direction in _MAPS:
                notify(f"{'causal' if causal else 'bidirectional'}, length {length}, {direction} ...")
                results = _time_all(
                    shape, dtype, device, causal, direction, length in compiled, turns=turns, budget=budget
                )
                table.rows.append(_row(shape, causal, direction, results))
                save(table)
    return table


def _time_all(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    causal: bool,
    direction: str,
    compiled: bool,
    *,
    turns: int,
    budget: float,
) -> dict[str, Result]:
    strength = torch.full((shape[1],), STRENGTH, device=device)
    versions: dict[str, Attend] = {"fused": partial(attend_refined, "fused", causal, strength)}
    versions["fused again"] = versions["fused"]
    for name, backend in SDPA.items() if device == "cuda" else {"default": None}.items():
        versions[f"sdpa {name}"] = partial(attend_plain, backend, causal)
    versions |= flash_versions(causal)
    if _fits(shape, direction, device):
        versions["eager"] = partial(attend_refined, "reference", causal, strength)
        if compiled:
            torch._dynamo.reset()
            versions["compiled"] = torch.compile(
                partial(attend_refined, "reference", causal, strength), dynamic=False
            )
    states = states_and_gradient(shape, dtype, device)
    calls = {name: one_call(attend, states, direction) for name, attend in versions.items()}
    for name, refinement in LEARNED.items():
        calls[name] = learned_call(refinement, causal, states, direction)
    replayed = device == "cuda" and shape[2] <= REPLAYED
    return in_turn(calls, turns=turns, budget=budget, clock=clock_of(device), replayed=replayed)


def _row(shape: tuple[int, ...], causal: bool, direction: str, found: dict[str, Result]) -> dict[str, Cell]:
    fused, eager, compiled = found["fused"], found.get("eager"), found.get("compiled")
    backend, sdpa = fastest({n.removeprefix("sdpa "): r for n, r in found.items() if n.startswith("sdpa ")})
    flash = [name for name in FLASH if name in found]
    return {
        "attention": "causal" if causal else "bidirectional",
        "pass": direction,
        "length": shape[2],
        "batch": shape[0],
        "fused": milliseconds(fused),
        "sdpa": milliseconds(sdpa),
        "backend": backend,
        "eager": milliseconds(eager),
        "compiled": milliseconds(compiled),
        "learned": milliseconds(found.get("learned")),
        "key bias": milliseconds(found.get("key bias")),
        **{name: milliseconds(found[name]) for name in flash},
        "fused / sdpa": ratio(fused, sdpa),
        "learned / sdpa": ratio(found.get("learned"), sdpa),
        "key bias / sdpa": ratio(found.get("key bias"), sdpa),
        **{f"{name} / sdpa": ratio(found[name], sdpa) for name in flash},
        "eager / fused": ratio(eager, fused),
        "compiled / fused": ratio(compiled, fused),
        "spread %": spread(fused),
        "again": ratio(found["fused again"], fused),
    }


def fastest(results: dict[str, Result]) -> tuple[str, Result]:
    """Name and result of the fastest version; the first failure if all failed."""
    timed = {name: result for name, result in results.items() if isinstance(result, Timing)}
    if timed:
        best = min(timed, key=lambda name: timed[name].median)
        return best, timed[best]
    return "none", next(iter(results.values()))


def training_memory(lengths: Sequence[int]) -> BenchmarkTable:
    """Peak memory of forward + backward beyond the inputs, batch 1, and how its excess over SDPA grows."""
    dtype = torch.bfloat16
    table = BenchmarkTable(
        "memory", f"Memory of a training step's attention, 1 x {HEADS} heads, {dtype}", machine("cuda")
    )
    for causal in (False, True):
        extra: dict[int, float] = {}
        for length in lengths:
            states = states_and_gradient((1, HEADS, length, DIM), dtype, "cuda")
            strength = torch.full((HEADS,), STRENGTH, device="cuda")
            peaks: dict[str, float | str] = {}
            versions: dict[str, Attend] = {"fused": partial(attend_refined, "fused", causal, strength)}
            versions["sdpa"] = partial(attend_plain, SDPBackend.FLASH_ATTENTION, causal)
            calls = {
                name: one_call(attend, states, "forward + backward") for name, attend in versions.items()
            }
            calls["learned"] = learned_call(LEARNED["learned"], causal, states, "forward + backward")
            for name, call in calls.items():
                try:
                    call()
                    peaks[name] = added_memory(call)
                except Exception as error:
                    peaks[name] = Failure.of(error).reason
            fused, sdpa = peaks["fused"], peaks["sdpa"]
            if isinstance(fused, float) and isinstance(sdpa, float):
                extra[length] = fused - sdpa
            table.rows.append(
                {
                    "attention": "causal" if causal else "bidirectional",
                    "length": length,
                    "fused MiB": fused,
                    "learned MiB": peaks["learned"],
                    "sdpa MiB": sdpa,
                    "extra MiB": extra.get(length),
                    "one float32 map MiB": HEADS * length**2 * 4 / 2**20,
                }
            )
        power = growth(extra)
        if power is not None:
            kind = "causal" if causal else "bidirectional"
            table.notes.append(f"The extra memory, {kind}, grows as length to the power {power:.2f}.")
    return table


def growth(sizes: dict[int, float]) -> float | None:
    """Exponent of a power law fitted to positive sizes by least squares in logarithms."""
    fitted = {n: size for n, size in sizes.items() if size > 0}
    if len(fitted) < 2:
        return None
    return float(np.polyfit(np.log(list(fitted)), np.log(list(fitted.values())), 1)[0])


def attend_refined(
    backend: Backend, causal: bool, strength: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    bounded = BoundedStrength(strength, STRENGTH)
    return attention(q, k, v, REFINEMENT, is_causal=causal, backend=backend, strength=bounded)


def learned_call(refinement: Refinement, causal: bool, states: list[Tensor], direction: str) -> Call:
    """A call with strengths that learn, whose gradient is part of the backward pass."""
    strengths = torch.linspace(0.05, 4.0, states[0].shape[1], device=states[0].device)

    def attend(strength: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, refinement, is_causal=causal, backend="fused", strength=strength)

    return one_call(attend, [strengths, *states], direction)


def attend_plain(backend: SDPBackend | None, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if backend is None:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def states_and_gradient(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Query, key, value and the output's gradient, with the strides that models use."""
    batch, heads, length, dim = shape
    random = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, batch, length, heads, dim, generator=random, device=device, dtype=dtype)
    return [make().transpose(1, 2) for _ in range(4)]


def one_call(attend: Attend, states: list[Tensor], direction: str) -> Call:
    """``attend`` on all states but the last, which is the gradient of its output."""
    *inputs, gradient = states

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    def both() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(attend(*leaves), leaves, gradient)

    return forward if direction == "forward" else both


def _fits(shape: tuple[int, ...], direction: str, device: str) -> bool:
    """Whether the eager reference's maps take less than four fifths of the free memory."""
    if device != "cuda":
        return True
    torch.cuda.empty_cache()
    return math.prod(shape[:2]) * shape[2] ** 2 * 4 * _MAPS[direction] < 0.8 * torch.cuda.mem_get_info()[0]


FLASH = {"flash 3": "flash_attn_interface", "flash 4": "flash_attn.cute"}
"""Column of a table to the module that has its ``flash_attn_func``."""


def flash_versions(causal: bool) -> dict[str, Attend]:
    """Plain attention by each version of FlashAttention that can be imported."""
    versions: dict[str, Attend] = {}
    for name, module in FLASH.items():
        try:
            function = importlib.import_module(module).flash_attn_func
        except (ImportError, AttributeError):
            continue
        versions[name] = partial(attend_flash, function, causal)
    return versions


def attend_flash(function: Callable[..., Any], causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """States ``[batch, heads, length, dim]``; the function takes ``[batch, length, heads, dim]``."""
    states = (x.transpose(1, 2) for x in (q, k, v))
    out = function(*states, causal=causal)
    output: Tensor = out[0] if isinstance(out, tuple) else out  # some versions return the log-sum-exp too
    return output.transpose(1, 2)

"""Which path a call takes, and why: the one place that decides. Nothing here imports Triton or the kernels."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from saobp.kernels.call_spec import is_short
from saobp.propagation.cpu_inference import cpu_obstacle, is_unwatched
from saobp.refinement import Refinement

Backend = Literal["auto", "reference", "fused"]
Family = Literal["short", "long", "short causal", "causal", "elemmul"]

TRITON_FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Both are asked once: the compiler cannot trace such questions."""

POTTS = {"high": (1.0, True), "low": (-1.0, True), "high-listing": (1.0, False), "low-listing": (-1.0, False)}
"""Sign of the strength, and whether rows hear each other."""

HALF_STRONGEST = 8.0
"""Beyond this strength weights and gradients of single entries leave the range of float16."""


class Call(NamedTuple):
    """All that the path of a call depends on, apart from how its tensors lie in memory.

    ``strongest`` bounds the strengths where that is known without asking the GPU; ``longest`` is of a packed batch;
    ``values_only`` says that no gradient, compiler or tracer needs anything but the values (asked on a CPU alone).
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    device: str
    refinement: Refinement
    is_causal: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    backend: Backend = "auto"
    strongest: float | None = None
    longest: int | None = None
    has_attn_mask: bool = False
    has_bias: bool = False
    values_only: bool = False

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, refinement: Refinement, strength: Tensor | None = None,
        *, backend: Backend = "auto", **options: Any,
    ) -> Call:  # fmt: skip
        states: tuple[Tensor, ...] = (query, key, value)
        if strength is not None and not refinement.is_plain:
            states = (*states, strength)
        values_only = backend == "auto" and query.device.type == "cpu" and is_unwatched(*states)
        return cls(
            query.shape, key.shape, value.shape, query.dtype, query.device.type, refinement,
            backend=backend, values_only=values_only, **options,
        )  # fmt: skip


class Path(NamedTuple):
    """Who computes a call. ``obstacle`` is why not the kernels, in words that fit behind 'because'."""

    name: Literal["fused", "torch", "cpu inference", "reference"]
    call: Call
    family: Family | None = None
    obstacle: str | None = None

    @property
    def is_fallback(self) -> bool:
        """Whether a refined call on a GPU is left to the slower reference."""
        return self.name == "reference" and self.call.backend == "auto" and self.call.device == "cuda"

    def __str__(self) -> str:
        who = f"fused {self.family} kernels" if self.name == "fused" else f"{self.name} path"
        return f"{who}: {self.reason}"

    @property
    def reason(self) -> str:
        call = self.call
        if self.name == "fused":
            return ", ".join((*_sizes(call), _strength(call)))
        if self.name == "torch":
            return "factor 'none' is ordinary attention, which PyTorch has"
        if self.name == "cpu inference":
            return "on a CPU where nothing but the values is needed"
        if call.backend == "reference":
            return "backend='reference' was asked for"
        return f"because {self.obstacle}"


def _sizes(call: Call) -> tuple[str, ...]:
    if call.longest is None:
        tokens = f"{call.query[2]} tokens"
    else:
        tokens = f"packed sequences of up to {call.longest} tokens"
    return tokens, f"head size {call.query[3]}", str(call.dtype).removeprefix("torch.")


def _strength(call: Call) -> str:
    if call.refinement.factor == "elemmul":
        return "a factor without strength"
    return "strength not known beforehand" if call.strongest is None else f"strength {call.strongest:g} known"


def select(call: Call) -> Path:
    """The path of a call. Raises where the kernels were asked for by name and cannot do it."""
    if call.backend not in ("auto", "reference", "fused"):
        raise ValueError(f"unknown backend {call.backend!r}: choose 'auto', 'reference' or 'fused'")
    if call.backend == "reference":
        return Path("reference", call)
    obstacle: str | None = f"the tensors are on {call.device}, not on a CUDA GPU"
    if call.backend == "fused" or call.device == "cuda":
        obstacle = unsupported(call)
        if obstacle is None:
            longest = call.query[2] if call.longest is None else call.longest
            kernels = family(call.refinement.factor, call.is_causal, longest, call.query[3], call.dtype)
            return Path("fused", call, kernels)
        if call.backend == "fused":
            raise ValueError(f"the fused backend cannot do this call because {obstacle}")
    if call.refinement.is_plain and (call.device == "cuda" or call.values_only):
        return Path("torch", call, obstacle=obstacle)
    if call.device != "cpu":
        return Path("reference", call, obstacle=obstacle)
    obstacle = cpu_obstacle(call.refinement, call.query, call.key, call.value, call.dropout_p)
    if call.has_bias:
        obstacle = "attn_mask adds numbers to the scores"
    if not call.values_only:
        obstacle = "a gradient, autocast, a tensor subclass, a tracer or torch.compile needs the reference's operations"
    return Path("reference" if obstacle else "cpu inference", call, obstacle=obstacle)


def unsupported(call: Call) -> str | None:
    """Why the kernels cannot do this call, in words that fit behind 'because'; None if they can."""
    query, key, value, dtype, device, refinement = call[:6]
    factor = refinement.factor
    if not TRITON_FOUND:
        return "Triton is not installed"
    if device != "cuda" and not INTERPRETED:
        return f"the tensors are on {device}, not on a CUDA GPU"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{dtype} is not float16, bfloat16 or float32"
    if INTERPRETED and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if factor not in POTTS and factor != "elemmul":
        return f"factor {factor!r} has no kernel"
    if call.has_attn_mask:
        return "there is no kernel for attn_mask yet"
    if factor == "elemmul" and call.is_causal:
        return "causal 'elemmul' has no kernel"
    if factor == "elemmul" and call.dropout_p:
        return "dropout on 'elemmul' needs the entries of A A^T, which its kernels never form"
    known = 0.0 if call.strongest is None or factor not in POTTS else call.strongest
    if known > HALF_STRONGEST and dtype != torch.float32:
        return f"strength {known:g} is more than the {HALF_STRONGEST:g} that {dtype} has range for"
    if refinement.steps != 1:
        return f"{refinement.steps} steps were asked for and the kernels do one"
    if call.is_causal and refinement.future == "paper" and POTTS[factor][1]:
        return "the leaking form of causal attention has no kernel"
    if query[2] != key[2]:
        return f"{query[2]} queries and {key[2]} keys differ in number"
    if value[3] != query[3]:
        return f"keys of size {query[3]} and values of size {value[3]} differ"
    if not 1 <= query[3] <= 256:
        return f"head size {query[3]} is not between 1 and 256"
    if call.scale is not None and call.scale <= 0:
        return f"scale {call.scale} is not positive"
    if 0 in query:
        return "there is nothing to compute"
    return None


def family(factor: str, is_causal: bool, longest: int, dim: int, dtype: torch.dtype) -> Family:
    """Which kernels serve a call that they support."""
    if factor == "elemmul":
        return "elemmul"
    short = is_short(longest, dim, dtype)
    if is_causal:
        return "short causal" if short else "causal"
    return "short" if short else "long"

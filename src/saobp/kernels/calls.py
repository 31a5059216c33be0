"""What decides the path of a call, and what ``dispatch`` chose for it, in words for ``saobp.explain``."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from saobp.propagation.cpu_inference import needs_values_only, takes_operators
from saobp.refinement import Refinement

Backend = Literal["auto", "reference", "fused"]
Family = Literal[
    "short", "long", "key bias", "short causal", "causal", "elemmul", "steps", "short steps", "masked"
]

POTTS = {
    "high": (1.0, 1), "low": (-1.0, 1), "high-key-bias": (1.0, 2), "low-key-bias": (-1.0, 2),
    "high-listing": (1.0, 0), "low-listing": (-1.0, 0),
}  # fmt: skip
"""Sign of the strength, and whose messages a row receives: no others' (0), all others' (1), or its own too (2)."""


class Call(NamedTuple):
    """All that the path of a call depends on, apart from the memory layout of its tensors.

    strongest:   no strength is negative or above this; None if that is not known without asking the GPU
    longest:     tokens of the longest sequence of a packed batch
    window:      rows see keys less than this many places away
    values_only: no gradient, compiler or tracer is involved (used on a CPU only)
    traced:      something else than ``torch.compile`` needs PyTorch's own operations (looked at for causal ElemMul only)
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
    window: int | None = None
    values_only: bool = False
    traced: bool = False

    @property
    def is_masked(self) -> bool:
        """Whether rows see different keys for other reasons than padding and causality."""
        return self.has_attn_mask or (self.window is not None and self.window < self.key[2])

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, refinement: Refinement, strength: Tensor | None = None,
        *, bias: Tensor | None = None, backend: Backend = "auto", **options: Any,
    ) -> Call:  # fmt: skip
        states = [query, key, value]
        if strength is not None and not refinement.is_plain:
            states.append(strength)
        if bias is not None:
            states.append(bias)
        values_only = backend == "auto" and query.device.type == "cpu" and needs_values_only(*states)
        traced = (
            refinement.factor == "elemmul"
            and options.get("is_causal", False)
            and not takes_operators(*states)
        )
        return cls(
            query.shape, key.shape, value.shape, query.dtype, query.device.type, refinement, backend=backend,
            has_bias=bias is not None, values_only=values_only, traced=traced, **options,
        )  # fmt: skip


class KernelChoice(NamedTuple):
    """Which kernels of its family a call launches, and how.

    weak:        kernels that refine in bfloat16 by polynomials, for strengths known to be weak
    careful:     kernels in the log domain, against underflow: alone, or after faster ones for the heads that need it
    hopper:      kernels written for Hopper, forward; of up to 128 tokens, backward too
    hopper_back: the same backward, from 129 tokens on
    joint_sums:  row and key sums in one kernel written for Hopper
    stored:      the backward pass stores the gradients of scores
    tma:         tiles are fetched by TMA (Hopper's tensor memory accelerator)
    split_axis:  axis of ``[batch, heads, ...]`` that is halved over two streams
    """

    weak: bool = False
    careful: bool = False
    hopper: bool = False
    hopper_back: bool = False
    joint_sums: bool = False
    stored: bool = False
    tma: bool = False
    split_axis: int | None = None

    def __str__(self) -> str:
        """In a few words, for ``saobp.explain``."""
        words = ["bfloat16 polynomials" if self.weak else "exponentials"]
        words += ["log domain where rows may underflow"] * self.careful
        words += ["Hopper kernel"] * (self.hopper or self.hopper_back or self.joint_sums)
        words += ["TMA"] * self.tma
        return ", ".join(words + ["two streams"] * (self.split_axis is not None))


class Path(NamedTuple):
    """What computes a call. ``obstacle`` is why not something faster, in words that fit behind 'because'.

    ``kernels`` is set if the layout of the tensors is known, as in ``saobp.explain``.
    """

    name: Literal["fused", "chunked", "torch", "cpu inference", "reference"]
    call: Call
    family: Family | None = None
    obstacle: str | None = None
    kernels: KernelChoice | None = None

    @property
    def is_fallback(self) -> bool:
        """Whether a refined call on a GPU falls back to the slower reference."""
        return self.name == "reference" and self.call.backend == "auto" and self.call.device == "cuda"

    def __str__(self) -> str:
        who = f"fused {self.family} kernels" if self.name == "fused" else f"{self.name} path"
        return f"{who}: {self.reason}"

    @property
    def reason(self) -> str:
        call = self.call
        if self.name == "fused":
            words = (*_sizes(call), _strength(call), *([] if self.kernels is None else [str(self.kernels)]))
            return ", ".join((*words, *_masks(call)))
        if self.name == "chunked":
            return ", ".join((*_sizes(call), "causal 'elemmul' as linear attention over chunks of rows"))
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
    several = [f"{call.refinement.steps} steps"] if call.refinement.steps > 1 else []
    return tokens, f"head size {call.query[3]}", str(call.dtype).removeprefix("torch."), *several


def _masks(call: Call) -> tuple[str, ...]:
    window = () if call.window is None or not call.is_masked else (f"sliding window of {call.window}",)
    return (*window, *(("attn_mask",) if call.has_attn_mask else ()))


def _strength(call: Call) -> str:
    if call.refinement.factor == "elemmul":
        return "a factor without strength"
    return "strength not known beforehand" if call.strongest is None else f"strength {call.strongest:g} known"

"""The description of a call that operators, plans and launches share: its tensors and its scalars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHORT = 128
"""Most tokens of a sequence whose attention map one program holds in registers."""
WHOLE = 256
"""The same on Hopper, where one program takes all registers of a multiprocessor (``hopper/whole_map.py``)."""
JOINT = 512
"""Most tokens of a sequence whose row and key sums one Hopper kernel computes (``hopper/joint_sums.py``)."""

WEAK_GAMMA_MIN, WEAK_GAMMA_MAX = -0.25, 0.21
"""A strength is weak if gamma is in this range: parabolas then give messages to 4e-4, well under bfloat16's rounding."""


@dataclass(frozen=True)
class Block:
    """Tile of a sweep: rows x keys, how many warps and pipeline stages work on it, and a cap on registers."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 3
    registers: int | None = None


class CallTensors(NamedTuple):
    """Tensors of a call, in the order of every operator.

    query:      ``[batch, heads, length, dim]``
    key, value: ``[batch, key_heads, length, dim]``
    strength:   ``[heads]``; for several steps ``[steps, heads]``
    mask:       of padding ``[batch, length]``: not 0 for real tokens
    cu:         cumulative lengths of a packed batch ``[sequences + 1]``
    seed:       of dropout ``[1]``
    """

    query: Tensor
    key: Tensor
    value: Tensor
    strength: Tensor
    mask: Tensor | None = None
    cu: Tensor | None = None
    seed: Tensor | None = None


def kernel_tensors(tensors: tuple[Any, ...]) -> list[Tensor]:
    """Tensors of a call with a dummy, the strength (the fourth), in place of None: kernels take a pointer that they never read."""
    strength = tensors[3]
    return [strength if one is None else one for one in tensors]


def layout(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cache key of CallTensors: shapes, strides, types, devices, and whether states are aligned to 16 bytes, as TMA
    requires."""
    query, key, value, strength, mask, cu, seed = tensors
    return (
        (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15,
        query.shape, query.stride(), query.dtype, query.device,
        key.shape, key.stride(), key.dtype, key.device, value.stride(), value.dtype, value.device,
        strength.dtype, strength.device,
        mask if mask is None else (mask.dtype, mask.device),
        cu if cu is None else (cu.dtype, cu.device, cu.shape),
        seed if seed is None else (seed.dtype, seed.device),
    )  # fmt: skip


class CallNumbers(NamedTuple):
    """Scalars of a call, in the order of every operator.

    longest:  tokens of the longest sequence
    scale:    of scores
    dropout:  probability
    sign:     of the strength: 1 for factors that repel, -1 for those that attract
    receives: whose messages a row receives: 0, nobody's (its own is divided out); 1, those of all other rows; 2, its own
              too (a key bias)
    bound:    gamma of each head lies between 0 and this number; 0 if such a number is not known, as with trained strengths
    steps:    of propagation
    damping:  share of the old belief that each of several steps keeps
    stride:   every how many-th real row sends messages (``message_stride``)
    """

    longest: int
    scale: float
    dropout: float = 0.0
    sign: float = 1.0
    receives: int = 0
    bound: float = 0.0
    steps: int = 1
    damping: float = 0.0
    stride: int = 1


@dataclass(frozen=True)
class CallSpec:
    """Everything about a call but its tensors. Fields that ``CallNumbers`` has mean the same here.

    sequences: ``batch``, or those of a packed batch
    group:     heads that share a head of keys and values
    length:    tokens of a row of the batch, in which a packed batch has all its sequences
    masked:    whether there is padding

    gamma = 1 - e^(-sign strength) is the weight of messages.
    """

    batch: int
    sequences: int
    heads: int
    group: int
    length: int
    longest: int
    dim: int
    dtype: torch.dtype
    scale: float
    dropout: float
    sign: float
    receives: int
    bound: float
    masked: bool
    packed: bool
    heads_first: bool = False
    """Whether queries, keys and values are contiguous ``[batch, heads, length, dim]``, as gradients then are too."""
    steps: int = 1
    damping: float = 0.0
    stride: int = 1

    @classmethod
    def of(cls, tensors: CallTensors, numbers: CallNumbers) -> CallSpec:
        batch, heads, length, dim = tensors.query.shape
        longest, scale, dropout, sign, receives, bound, steps, damping, stride = numbers
        return cls(
            batch=batch, sequences=batch if tensors.cu is None else tensors.cu.shape[0] - 1, heads=heads,
            group=heads // tensors.key.shape[1], length=length, longest=longest, dim=dim, dtype=tensors.query.dtype,
            scale=scale, dropout=dropout, sign=sign, receives=receives, bound=bound,
            masked=tensors.mask is not None, packed=tensors.cu is not None,
            heads_first=all(one.is_contiguous() for one in tensors[:3]), steps=steps, damping=damping,
            stride=stride,
        )  # fmt: skip

    @cached_property
    def precise(self) -> int:
        """PRECISE of the kernels. 0: bfloat16 by polynomials, for known weak strengths; 1: float32 by the hardware's approximate
        logarithm and reciprocal; 2, for float32 states: full float32, with log-sum-exps in two parts."""
        if self.dtype == torch.float32:
            return 2
        is_weak = self.bound and WEAK_GAMMA_MIN <= self.bound <= WEAK_GAMMA_MAX
        return 0 if is_weak and self.dtype == torch.bfloat16 else 1

    @property
    def weight_dtype(self) -> torch.dtype:
        """Type of ``weight``, the stored factors of keys: the inputs' type where tiles are refined in it, else float32."""
        return self.dtype if self.precise == 0 else torch.float32

    @property
    def splits_inverse(self) -> bool:
        """Whether a row's inverse normaliser may exceed the range of its scaled gradient's type."""
        return self.dtype == torch.float16 and self.precise != 0

    @property
    def low_plane(self) -> int:
        """Offset, in numbers, from the first part of the rows' log-sum-exp to the second, in ``lse_shape``."""
        return self.batch * self.heads * self.length

    @property
    def lse_shape(self) -> tuple[int, int, int, int]:
        """``[parts, batch, heads, length]``."""
        return (2 if self.precise == 2 else 1, self.batch, self.heads, self.length)

    @property
    def rows_shape(self) -> tuple[int, int, int]:
        """``[batch, heads, length]``: one number per row, or per key, of every head."""
        return (self.batch, self.heads, self.length)

    @property
    def states_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.heads, self.length, self.dim)

    @property
    def states_strides(self) -> tuple[int, int, int, int]:
        """Strides of ``[batch, heads, length, dim]`` that lies in memory as ``[batch, length, heads, dim]``, which models use next."""
        return (self.length * self.heads * self.dim, self.dim, self.heads * self.dim, 1)

    @property
    def gradient_strides(self) -> tuple[int, int, int, int]:
        """Strides of gradients ``[batch, heads, length, dim]``: the inputs', since autograd copies what is laid out otherwise."""
        if not self.heads_first:
            return self.states_strides
        return (self.heads * self.length * self.dim, self.length * self.dim, self.dim, 1)

    @property
    def lowest_sum(self) -> float:
        """Below this normaliser a row is computed with logarithms.

        float16 weights have little range; tiles refined in bfloat16 estimate rounding errors from the normaliser.
        """
        if self.dtype == torch.float16:
            return 2.0**-6
        return 2.0**-40 if self.precise == 0 else 2.0**-80

    @cached_property
    def may_underflow(self) -> bool:
        """Whether a row's normaliser can fall below ``lowest_sum``."""
        return self.may_fall_below(self.lowest_sum)

    def may_fall_below(self, lowest: float) -> bool:
        """Whether a row's normaliser can fall below ``lowest``: it is at least e^(-strength length)."""
        if not self.receives:
            return False
        strongest = abs(math.log1p(-self.bound)) if self.bound else math.inf
        return strongest * self.longest * math.log2(math.e) > -math.log2(lowest) - 2

    @property
    def senders(self) -> int:
        """The most rows of a sequence that may send messages."""
        return ceil_div(self.length, self.stride)

    def programs(self, block: int) -> int:
        """Grid of a sweep with a program per ``block`` tokens of every head."""
        return ceil_div(self.longest, block) * self.sequences * self.heads

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Scalar arguments of every kernel, by name."""
        return {
            "heads": self.heads,
            "group": self.group,
            "length": self.length,
            "score_scale": self.scale * math.log2(math.e),
        }

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments of every kernel, by name."""
        return {
            "DIM": self.dim,
            "BLOCK_DIM": max(16, next_power_of_2(self.dim)),
            "MASKED": self.masked,
            "PACKED": self.packed,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
            "STRIDE": self.stride,
        }

    @cached_property
    def message_numbers(self) -> dict[str, float]:
        """The strength's sign, and coefficients r0, r1, r2 of 1 / (1 - x) and l0, l1, l2 of log2(1 - x) / x on [0, bound]."""
        names = ("r0", "r1", "r2", "l0", "l1", "l2")
        if self.precise:
            return {"sign": self.sign, **dict.fromkeys(names, 0.0)}
        inverse = parabola(lambda x: 1 / (1 - x), self.bound)
        logarithm = parabola(lambda x: math.log2(1 - x) / x, self.bound)
        return {"sign": self.sign, **dict(zip(names, inverse + logarithm, strict=True))}

    @cached_property
    def drop_numbers(self) -> dict[str, Any]:
        """Dropout: weights are kept where a random 32-bit number is at least the threshold, and scaled."""
        return {
            "drop_threshold": min(int(self.dropout * 2**32), 2**32 - 1),
            "keep_scale": 1 / (1 - self.dropout),
        }


def ceil_div(count: int, step: int) -> int:
    """As ``triton.cdiv``, which costs several microseconds."""
    return -(-count // step)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << (count - 1).bit_length()


def is_short(longest: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether one program can hold a head's whole map."""
    return longest <= SHORT and dim <= 128 and dtype != torch.float32


def padded_keys(spec: CallSpec) -> int:
    """Tokens of the longest sequence as a power of two, 16 or more: the side of a tile that holds its map."""
    return max(16, next_power_of_2(spec.longest))


def parabola(function: Callable[[float], float], bound: float) -> tuple[float, float, float]:
    """c0, c1, c2 of c0 + c1 x + c2 x^2, which interpolates at the three Chebyshev nodes of [0, bound]."""
    x, y, z = (bound * (0.5 + 0.5 * math.cos(math.pi * (2 * i + 1) / 6)) for i in range(3))
    slope, second = (function(y) - function(x)) / (y - x), (function(z) - function(y)) / (z - y)
    c2 = (second - slope) / (z - x)
    c1 = slope - c2 * (x + y)
    return function(x) - x * (c1 + c2 * x), c1, c2


def strides(prefix: str, states: Tensor) -> dict[str, int]:
    """Batch, head and row strides of ``[batch, heads, length, dim]`` under a kernel's argument names."""
    return named_strides(prefix, states.stride())


def named_strides(prefix: str, numbers: Sequence[int]) -> dict[str, int]:
    return {f"{prefix}_batch": numbers[0], f"{prefix}_head": numbers[1], f"{prefix}_row": numbers[2]}


def resources(block: Block) -> dict[str, Any]:
    return {"num_warps": block.warps, "num_stages": block.stages, "maxnreg": block.registers}


def blocks(spec: CallSpec, block: Block, gridded: int, walked: int | None = None) -> dict[str, Any]:
    """Size arguments of a sweep with a program per ``gridded`` tokens.

    ``walked``, the tokens per step of a program's loop, determines whether the last step is partial.
    """
    sizes = {
        "blocks": ceil_div(spec.longest, gridded),
        "ROWS": block.rows,
        "KEYS": block.keys,
        **resources(block),
    }
    if walked is not None:
        sizes["TAIL"] = spec.packed or spec.length % walked != 0
    return sizes

"""Sizes and launches: from tensors to kernel calls, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from saobp.kernels import backward, forward, short

SHORT = 128
"""Longest sequence whose keys one program holds at once."""


WEAKEST, STRONGEST = -0.25, 0.21
"""Bounds on gamma between which parabolas give messages to 4e-4, well under bfloat16's rounding."""


@dataclass(frozen=True)
class Block:
    """Tile of a sweep: rows x keys, how many warps and pipeline stages work on it, and a cap on registers."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 3
    registers: int | None = None


@dataclass(frozen=True)
class Problem:
    """Everything about a call but its tensors. ``sequences`` differ from the batch when packed."""

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
    hears: bool
    bound: float
    masked: bool
    packed: bool

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, mask: Tensor | None, cu: Tensor | None,
        longest: int, scale: float, dropout: float, hears: bool, bound: float,
    ) -> Problem:  # fmt: skip
        batch, heads, length, dim = query.shape
        return cls(
            batch=batch,
            sequences=batch if cu is None else cu.shape[0] - 1,
            heads=heads,
            group=heads // key.shape[1],
            length=length,
            longest=longest,
            dim=dim,
            dtype=query.dtype,
            scale=scale,
            dropout=dropout,
            hears=hears,
            bound=bound,
            masked=mask is not None,
            packed=cu is not None,
        )

    @property
    def precise(self) -> int:
        """How messages are computed: polynomials where they suffice, full precision for float32."""
        if self.dtype == torch.float32:
            return 2
        polynomial = self.dtype == torch.bfloat16 and self.bound and WEAKEST <= self.bound <= STRONGEST
        return 0 if polynomial else 1

    @property
    def low_plane(self) -> int:
        """Distance of the second part of the rows' log-sum-exp from the first."""
        return self.batch * self.heads * self.length

    @property
    def lse_shape(self) -> tuple[int, int, int, int]:
        return (2 if self.precise == 2 else 1, self.batch, self.heads, self.length)

    @property
    def lowest_blocks(self) -> int:
        """How many blocks of rows of a head note their smallest normaliser."""
        block = short_block(self) if self.is_short else sweep_block(self, "refined_output")
        return triton.cdiv(self.longest, block.rows)

    @property
    def is_short(self) -> bool:
        return self.longest <= SHORT and self.dim <= 128 and self.dtype != torch.float32

    @property
    def lowest_sum(self) -> float:
        """Below this normaliser a row is computed with logarithms; float16 weights have far less range."""
        return 2.0**-6 if self.dtype == torch.float16 else 2.0**-80

    @property
    def may_underflow(self) -> bool:
        """Whether a row's normaliser can fall below ``lowest_sum``: it is at least e^(-strength length)."""
        if not self.hears:
            return False
        strongest = abs(math.log1p(-self.bound)) if self.bound else math.inf
        return strongest * self.longest * math.log2(math.e) > -math.log2(self.lowest_sum) - 2

    def programs(self, block: int) -> int:
        return triton.cdiv(self.longest, block) * self.sequences * self.heads

    def numbers(self) -> dict[str, Any]:
        return {
            "heads": self.heads,
            "group": self.group,
            "length": self.length,
            "score_scale": self.scale * math.log2(math.e),
        }

    def constants(self) -> dict[str, Any]:
        return {
            "DIM": self.dim,
            "BLOCK_DIM": max(16, triton.next_power_of_2(self.dim)),
            "MASKED": self.masked,
            "PACKED": self.packed,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
        }

    def message_numbers(self) -> dict[str, float]:
        """Coefficients of the parabolas for 1 / (1 - x) and log2(1 - x) / x on [0, bound]."""
        if self.precise:
            return dict.fromkeys(("r0", "r1", "r2", "l0", "l1", "l2"), 0.0)
        inverse = parabola(lambda x: 1 / (1 - x), self.bound)
        logarithm = parabola(lambda x: math.log2(1 - x) / x, self.bound)
        return dict(zip(("r0", "r1", "r2", "l0", "l1", "l2"), inverse + logarithm, strict=True))

    def drop_numbers(self) -> dict[str, Any]:
        return {
            "drop_threshold": min(int(self.dropout * 2**32), 2**32 - 1),
            "keep_scale": 1 / (1 - self.dropout),
        }


def parabola(function: Callable[[float], float], bound: float) -> tuple[float, float, float]:
    """Interpolates at the three Chebyshev nodes of [0, bound]; c0 + c1 x + c2 x^2."""
    x, y, z = (bound * (0.5 + 0.5 * math.cos(math.pi * (2 * i + 1) / 6)) for i in range(3))
    slope, second = (function(y) - function(x)) / (y - x), (function(z) - function(y)) / (z - y)
    c2 = (second - slope) / (z - x)
    c1 = slope - c2 * (x + y)
    return function(x) - x * (c1 + c2 * x), c1, c2


def strides(prefix: str, states: Tensor) -> dict[str, int]:
    """Batch, head and row strides of ``[batch, heads, length, dim]`` under a kernel's argument names."""
    return {
        f"{prefix}_batch": states.stride(0),
        f"{prefix}_head": states.stride(1),
        f"{prefix}_row": states.stride(2),
    }


def empty_states(problem: Problem, like: Tensor) -> Tensor:
    """``[batch, heads, length, dim]`` laid out as ``[batch, length, heads, dim]``, which models want next."""
    shape = (problem.batch, problem.length, problem.heads, problem.dim)
    return torch.empty(shape, dtype=like.dtype, device=like.device).transpose(1, 2)


def sweep_block(problem: Problem, sweep: str) -> Block:
    """Tile sizes found by ``benchmarks/tune_sweeps.py`` on an H200; small ones where registers are short."""
    if problem.dtype == torch.float32:
        return Block(32, 32, warps=4, stages=1) if problem.dim > 64 else Block(64, 32, warps=4, stages=2)
    if problem.dim > 128:
        return Block(64, 32, warps=4, stages=2)
    if problem.dim > 64:
        return Block(64, 64, warps=4, stages=2)
    return {
        "row_sums": Block(64, 64, 4, 3),
        "column_messages": Block(64, 128, 4, 3),
        "refined_output": Block(64, 128, 4, 2, 168),
        "value_gradient": Block(32, 128, 4, 3, 168),
        "query_gradient": Block(128, 64, 8, 3),
        "key_gradient": Block(64, 64, 4, 3, 168),
    }[sweep]


def run_forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, gamma: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output and what the backward pass needs: lse, heard, weight, anchor, inverse, lowest."""
    out = empty_states(problem, query)
    tensors: dict[str, Any] = {
        "q_ptr": query, "k_ptr": key, "mask_ptr": given(mask, gamma), "cu_ptr": given(cu, gamma),
        **strides("q", query), **strides("k", key),
    }  # fmt: skip
    messages = problem.message_numbers()
    output: dict[str, Any] = {
        "v_ptr": value,
        "out_ptr": out,
        "gamma_ptr": gamma,
        "seed_ptr": given(seed, gamma),
    }
    output |= {**strides("v", value), **strides("o", out), **problem.drop_numbers(), **messages}
    flags = {"HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0}
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    rows_shape = (problem.batch, problem.heads, problem.length)
    lse, anchor, inverse = (
        torch.empty(shape, **floats) for shape in (problem.lse_shape, rows_shape, rows_shape)
    )
    lowest = torch.empty(problem.sequences * problem.heads * problem.lowest_blocks, **floats)
    heard, weight = (torch.empty(rows_shape if problem.hears else 0, **floats) for _ in range(2))
    rows_parts: dict[str, Any] = {
        "lse_ptr": lse,
        "low_plane": problem.low_plane,
        "heard_ptr": heard,
        "weight_ptr": weight,
    }
    rows_parts |= {"anchor_ptr": anchor, "inverse_ptr": inverse, "lowest_ptr": lowest}
    if problem.is_short:
        block = short_block(problem)
        short.short_forward[(problem.sequences * problem.heads,)](
            **tensors, **output, **flags, **problem.numbers(), **problem.constants(), **rows_parts,
            **blocks(problem, block, block.rows, block.keys),
        )  # fmt: skip
        run_careful(problem, block.rows, tensors | output | rows_parts)
        return out, lse, heard, weight, anchor, inverse, lowest

    block = sweep_block(problem, "row_sums")
    forward.row_sums[(problem.programs(block.rows),)](
        **tensors,
        **problem.numbers(),
        **problem.constants(),
        **blocks(problem, block, block.rows, block.keys),
        lse_ptr=lse,
        low_plane=problem.low_plane,
        PRECISE=problem.precise,
    )
    if problem.hears:
        block = sweep_block(problem, "column_messages")
        count = triton.cdiv(problem.longest, block.keys)
        peak = torch.empty(problem.programs(block.keys), **floats)
        forward.column_messages[(problem.programs(block.keys),)](
            **tensors, **problem.numbers(), **problem.constants(), **blocks(problem, block, block.keys, block.rows), **messages,
            lse_ptr=lse, low_plane=problem.low_plane, gamma_ptr=gamma, heard_ptr=heard, peak_ptr=peak,
            PRECISE=problem.precise,
        )  # fmt: skip
        forward.key_weights[(problem.programs(block.keys),)](
            heard_ptr=heard, peak_ptr=peak, weight_ptr=weight, cu_ptr=given(cu, gamma), heads=problem.heads,
            length=problem.length, blocks=count, KEYS=block.keys, BLOCKS=triton.next_power_of_2(count),
            PACKED=problem.packed,
        )  # fmt: skip
    block = sweep_block(problem, "refined_output")
    forward.refined_output[(problem.programs(block.rows),)](
        **tensors, **output, **flags, **problem.numbers(), **problem.constants(),
        **blocks(problem, block, block.rows, block.keys), **rows_parts,
    )  # fmt: skip
    run_careful(problem, block.rows, tensors | output | rows_parts)
    return out, lse, heard, weight, anchor, inverse, lowest


def run_careful(problem: Problem, rows: int, arguments: dict[str, Any]) -> None:
    """Repeats what underflowed."""
    if problem.may_underflow:
        block = Block(rows, 32, stages=1)
        forward.careful_output[(problem.programs(rows),)](
            **arguments, **problem.numbers(), **problem.constants(), **blocks(problem, block, rows, 32),
            lowest_sum=problem.lowest_sum, PRECISE=problem.precise, DROPS=problem.dropout > 0,
        )  # fmt: skip


def run_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, gamma: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, heard: Tensor, weight: Tensor, anchor: Tensor, inverse: Tensor, lowest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma in parts ``[..., heads, ...]``."""
    dq, dk, dv = (empty_states(problem, query) for _ in range(3))
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    common: dict[str, Any] = {
        "q_ptr": query, "k_ptr": key, "v_ptr": value, "grad_ptr": grad, "gamma_ptr": gamma,
        "mask_ptr": given(mask, gamma), "cu_ptr": given(cu, gamma), "seed_ptr": given(seed, gamma),
        **strides("q", query), **strides("k", key), **strides("v", value), **strides("g", grad), **strides("d", dq),
        **problem.numbers(), **problem.constants(), **problem.drop_numbers(), **problem.message_numbers(),
        "scale": problem.scale, "HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
    }  # fmt: skip
    rows_shape = (problem.batch, problem.heads, problem.length)
    delta, scaled, heard_grad, dgamma, row_term = (torch.empty(rows_shape, **floats) for _ in range(5))
    constants = problem.constants()
    backward.row_products[(problem.programs(128),)](
        grad_ptr=grad, out_ptr=out, cu_ptr=given(cu, gamma), inverse_ptr=inverse, delta_ptr=delta, scaled_ptr=scaled,
        **strides("g", grad), **strides("o", out),
        heads=problem.heads, length=problem.length, blocks=triton.cdiv(problem.longest, 128), ROWS=128,
        DIM=constants["DIM"], BLOCK_DIM=constants["BLOCK_DIM"], SCALED=True, PACKED=problem.packed,
    )  # fmt: skip
    common |= {
        "lse_ptr": lse, "low_plane": problem.low_plane, "lowest_ptr": lowest, "lowest_blocks": problem.lowest_blocks,
        "LOWEST_BLOCKS": triton.next_power_of_2(problem.lowest_blocks), "lowest_sum": problem.lowest_sum, "anchor_ptr": anchor, "inverse_ptr": inverse,
        "CHECKED": problem.may_underflow,
    }  # fmt: skip
    fast = {"key_part_ptr": weight, "CAREFUL": False}
    careful = {"key_part_ptr": heard, "CAREFUL": True}
    ways = (fast, careful) if problem.may_underflow else (fast,)
    block = sweep_block(problem, "value_gradient")
    for way in ways:
        backward.value_gradient[(problem.programs(block.keys),)](
            **common, **way, **blocks(problem, block, block.keys, block.rows),
            delta_ptr=delta, dv_ptr=dv, heard_grad_ptr=heard_grad,
        )  # fmt: skip
    common |= {"heard_grad_ptr": heard_grad, "row_term_ptr": row_term}
    block = sweep_block(problem, "query_gradient")
    for part in (0,) if problem.precise == 0 else (1, 2):
        for way in ways:
            backward.query_gradient[(problem.programs(block.rows),)](
                **common, **way, **blocks(problem, block, block.rows, block.keys), PART=part,
                delta_ptr=scaled, dq_ptr=dq, strength_grad_ptr=dgamma,
            )  # fmt: skip
    block = sweep_block(problem, "key_gradient")
    for way in ways:
        backward.key_gradient[(problem.programs(block.keys),)](
            **common, **way, **blocks(problem, block, block.keys, block.rows),
            delta_ptr=scaled, dk_ptr=dk,
        )  # fmt: skip
    return dq, dk, dv, dgamma


def given(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer argument that is not there needs some tensor in its place; the kernel never reads it."""
    return stand_in if tensor is None else tensor


def short_block(problem: Problem) -> Block:
    """All keys at once, 64 rows at a time."""
    keys = max(16, triton.next_power_of_2(problem.longest))
    return Block(min(keys, 64), keys, warps=4, stages=1, registers=128)


def resources(block: Block) -> dict[str, Any]:
    return {"num_warps": block.warps, "num_stages": block.stages, "maxnreg": block.registers}


def blocks(problem: Problem, block: Block, gridded: int, walked: int | None = None) -> dict[str, Any]:
    """Sizes of a sweep with a program per ``gridded`` tokens.

    ``walked``, the step in which a program goes over all tokens, tells whether the last step is partial.
    """
    sizes = {
        "blocks": triton.cdiv(problem.longest, gridded),
        "ROWS": block.rows,
        "KEYS": block.keys,
        **resources(block),
    }
    if walked is not None:
        sizes["TAIL"] = problem.packed or problem.length % walked != 0
    return sizes

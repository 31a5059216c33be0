"""Long sequences, not causal: sizes of the sweeps and their launches, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saobp.kernels.bidirectional import backward, forward, sums
from saobp.kernels.bidirectional import gradient_terms as gradient_parts
from saobp.kernels.call_spec import (
    Block,
    Problem,
    blocks,
    ceil_div,
    given,
    named_strides,
    next_power,
    strides,
    tensor_looks,
)
from saobp.kernels.runtime.launcher import (
    Piece,
    Series,
    Tiles,
    has_copy_engine,
    is_aligned,
    lay_out,
    remembered,
)
from saobp.kernels.runtime.two_streams import moves

MAPPED_FROM = 1 << 28
"""Entries of all maps from which on the copy engine fetches tiles: describing a tensor to it takes the host some time.

At half as many, 512 heads of 512 tokens, a call with its backward pass waited for the host (1.1 ms instead of 0.8)."""


def sweep_block(problem: Problem, sweep: str) -> Block:
    """The compiler's symbol for a head size becomes the number it stands for: tiles depend on it."""
    return _sweep_block(problem.dtype, int(problem.dim), sweep)


@lru_cache(maxsize=4096)
def _sweep_block(dtype: torch.dtype, dim: int, sweep: str) -> Block:
    """Tile sizes found by ``benchmarks/tune_sweeps.py`` on an H200; small ones where registers are short."""
    if dtype == torch.float32:
        return Block(32, 32, warps=4, stages=1) if dim > 64 else Block(64, 32, warps=4, stages=2)
    if dim > 128:
        return Block(64, 32, warps=4, stages=2)
    if dim > 64:
        return Block(64, 64, warps=4, stages=2)
    return {
        "row_sums": Block(64, 128, 4, 2),
        "column_messages": Block(64, 128, 4, 2, 80),
        "refined_output": Block(128, 64, 4, 3),
        "value_gradient": Block(32, 128, 4, 3, 168),
        "query_gradient": Block(64, 64, 4, 3, 168),
        "key_gradient": Block(64, 64, 4, 3, 168),
    }[sweep]


def lowest_blocks(problem: Problem) -> int:
    """How many blocks of rows of a head note their smallest normaliser."""
    return ceil_div(problem.longest, sweep_block(problem, "refined_output").rows)


def copies_tiles(problem: Problem, *states: Tensor) -> bool:
    """Whether a GPU's copy engine may fetch tiles of these states."""
    return (
        problem.dim == 64
        and problem.dtype != torch.float32
        and not problem.packed
        and problem.sequences * problem.heads * problem.length**2 >= MAPPED_FROM
        and has_copy_engine(states[0].device)
        and all(is_aligned(one) for one in states)
    )


class Plan(NamedTuple):
    """What calls that look alike share: their launches, the layout of states that they fill, bytes of buffers."""

    series: Series
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    saved: int = 0
    scratch: int = 0
    keys_dtype: torch.dtype | None = None


STATES = ("q", "k", "v", "strength", "mask", "cu", "seed")
"""Tensors of a call, in the order of all functions here."""


def saved_pieces(problem: Problem) -> tuple[dict[str, Piece], int]:
    """What the backward pass needs besides the output, and the peaks of what blocks of keys hear."""
    floats, rows = torch.float32, problem.rows_shape
    keys = rows if problem.hears else (0,)
    lowest = problem.sequences * problem.heads * lowest_blocks(problem)
    peaks = problem.programs(sweep_block(problem, "column_messages").keys) if problem.hears else 0
    return lay_out("saved", {
        "lse": (problem.lse_shape, floats), "heard": (keys, floats), "anchor": (rows, floats), "inverse": (rows, floats),
        "lowest": ((lowest,), floats), "peak": ((peaks,), floats), "weight": (keys, problem.weight_dtype),
    }, apart=4)  # fmt: skip


def run_forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and in one buffer what the backward pass needs."""
    mapped = copies_tiles(problem, query, key, value)
    looks = ("forward", mapped, sweep_block, *tensor_looks(query, key, value, strength, mask, cu, seed))
    steps = (_add_sums, _add_output)
    plan = remembered(
        problem.plans, looks, plan_forward, problem, query, key, value, strength, mapped, *steps
    )
    out = query.new_empty_strided(plan.sizes, plan.strides)
    saved = query.new_empty(plan.saved, dtype=torch.uint8)
    plan.series(
        query, key, value, strength, given(mask, strength), given(cu, strength), given(seed, strength), out, saved
    )  # fmt: skip
    return out, saved


def run_sums(problem: Problem, query: Tensor, key: Tensor, strength: Tensor) -> Tensor:
    """Of what the backward pass needs, the part that does not depend on values."""
    mapped = copies_tiles(problem, query)
    looks = ("sums", mapped, sweep_block, *tensor_looks(query, key, None, strength, None, None, None))
    plan = remembered(
        problem.plans, looks, plan_forward, problem, query, key, query, strength, mapped, _add_sums
    )
    saved = query.new_empty(plan.saved, dtype=torch.uint8)
    plan.series(query, key, query, strength, strength, strength, strength, query, saved)
    return saved


def run_output(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, saved: Tensor
) -> Tensor:
    """Refined rows times values, from sums known already; fills in the rest of what the backward pass needs."""
    mapped = copies_tiles(problem, key, value)
    looks = ("output", mapped, sweep_block, *tensor_looks(query, key, value, strength, None, None, None))
    plan = remembered(
        problem.plans, looks, plan_forward, problem, query, key, value, strength, mapped, _add_output
    )
    out = query.new_empty_strided(plan.sizes, plan.strides)
    plan.series(query, key, value, strength, strength, strength, strength, out, saved)
    return out


Cut = Callable[[str, int], dict[str, Tiles]]
"""Tiles of so many rows of a call's states, by their letter; nothing where no copy engine fetches them."""


def plan_forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, mapped: bool,
    *steps: Callable[[Series, Problem, dict[str, Any], Cut], None],
) -> Plan:  # fmt: skip
    pieces, size = saved_pieces(problem)
    series = Series(query.device, (*STATES, "out", "saved"), pieces)
    numbers = _numbers(problem, query, key, value) | named_strides("o", problem.states_strides)
    states = {"q": query, "k": key, "v": value}

    def cut(names: str, rows: int) -> dict[str, Tiles]:
        views = {name: (tuple(states[name].shape), states[name].stride()) for name in names if mapped}
        return {name: Tiles(*view, (1, 1, rows, problem.dim)) for name, view in views.items()}

    for add_step in steps:
        add_step(series, problem, numbers | {"MAPPED": mapped}, cut)
    series.in_halves(moves(problem, strength, states, {"out": query.dtype}, pieces))
    return Plan(series, problem.states_shape, problem.states_strides, saved=size)


def _add_sums(series: Series, problem: Problem, numbers: dict[str, Any], cut: Cut) -> None:
    block = sweep_block(problem, "row_sums")
    own = blocks(problem, block, block.rows, block.keys)
    series.add(sums.row_sums, problem.programs(block.rows), numbers | own)
    if not problem.hears:
        return
    block = sweep_block(problem, "column_messages")
    programs, count = problem.programs(block.keys), ceil_div(problem.longest, block.keys)
    own = blocks(problem, block, block.keys, block.rows)
    series.add(sums.column_messages, programs, numbers | own, cut("q", block.rows))
    own = {"blocks": count, "KEYS": block.keys, "BLOCKS": next_power(count)}
    series.add(sums.key_weights, programs, numbers | own)


def _add_output(series: Series, problem: Problem, numbers: dict[str, Any], cut: Cut) -> None:
    block = sweep_block(problem, "refined_output")
    programs, tiles = problem.programs(block.rows), cut("kv", block.keys)
    if tiles and problem.precise == 0:  # registers are left: three programs to a multiprocessor
        block = replace(block, registers=168)
    own = blocks(problem, block, block.rows, block.keys)
    series.add(forward.refined_output, programs, numbers | own, tiles)
    if problem.may_underflow:  # repeats what did
        own = blocks(problem, Block(block.rows, 32, stages=1), block.rows, 32)
        series.add(forward.careful_output, programs, numbers | own)


def _numbers(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """What the sweeps share."""
    lowest = lowest_blocks(problem)
    return {
        **strides("q", query), **strides("k", key), **strides("v", value), **problem.numbers, **problem.constants,
        **problem.drop_numbers, **problem.message_numbers, "low_plane": problem.low_plane, "scale": problem.scale,
        "HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0, "POWER": problem.splits_inverse,
        "lowest_blocks": lowest, "LOWEST_BLOCKS": next_power(lowest), "lowest_sum": problem.lowest_sum,
        "CHECKED": problem.may_underflow,
    }  # fmt: skip


def run_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None, out: Tensor, saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma in parts ``[..., heads, ...]``."""
    looks = (
        "backward", sweep_block, grad.stride(), grad.dtype, out.stride(),
        *tensor_looks(query, key, value, strength, mask, cu, seed),
    )  # fmt: skip
    plan = remembered(problem.plans, looks, plan_backward, problem, grad, query, key, value, strength, out)
    dq, dk, dv = [query.new_empty_strided(plan.sizes, plan.strides) for _ in range(3)]
    dgamma = query.new_empty(problem.rows_shape, dtype=torch.float32)
    scratch = query.new_empty(plan.scratch, dtype=torch.uint8)
    plan.series(
        query, key, value, strength, given(mask, strength), given(cu, strength), given(seed, strength),
        grad, out, saved, dq, dk, dv, dgamma, scratch,
    )  # fmt: skip
    return dq, dk, dv, dgamma


def run_value_gradient(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, strength: Tensor, saved: Tensor
) -> Tensor:
    """The refined rows' transpose times a gradient."""
    looks = ("value gradient", sweep_block, *tensor_looks(query, key, grad, strength, None, None, None))
    make = partial(plan_backward, only_values=True)
    plan = remembered(problem.plans, looks, make, problem, grad, query, key, grad, strength, grad)
    dv = query.new_empty_strided(plan.sizes, plan.strides)
    scratch = query.new_empty(plan.scratch, dtype=torch.uint8)
    plan.series(
        query, key, grad, strength, strength, strength, strength, grad, grad, saved, dv, dv, dv, strength, scratch
    )  # fmt: skip
    return dv


PARTS = 16
"""Columns of D's parts: the least that a product on the tensor cores takes."""


def plan_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, out: Tensor,
    *, only_values: bool = False,
) -> Plan:  # fmt: skip
    floats, own, rows = torch.float32, query.dtype, problem.rows_shape
    scratch, size = lay_out("scratch", {
        "scaled": (problem.states_shape, own), "delta": (rows, floats), "parts": ((*rows, PARTS), own),
        "power": (rows if problem.splits_inverse else (0,), floats), "row_term": (rows, floats),
        "heard_grad": (rows, floats), "heard_half": (rows if problem.precise == 0 else (0,), own),
    })  # fmt: skip
    tensors = (*STATES, "grad", "out", "saved", "dq", "dk", "dv", "strength_grad", "scratch")
    pieces = saved_pieces(problem)[0] | scratch
    series = Series(query.device, tensors, pieces)
    add_scaled_gradients(series, problem, grad, out)
    numbers = _numbers(problem, query, key, value) | {"part_row": PARTS}
    numbers |= named_strides("g", problem.states_strides) | named_strides("d", problem.states_strides)
    for sweep in (backward.value_gradient, backward.query_gradient, backward.key_gradient):
        by_rows = sweep is backward.query_gradient
        block = sweep_block(problem, sweep.__name__)
        gridded, walked = (block.rows, block.keys) if by_rows else (block.keys, block.rows)
        sizes, programs = blocks(problem, block, gridded, walked), problem.programs(gridded)
        ways = [("weight", False), ("heard", True)] if problem.may_underflow else [("weight", False)]
        for key_part, careful in ways:
            series.add(
                sweep, programs, numbers | sizes | {"CAREFUL": careful}, grad="scaled", key_part=key_part
            )
        if only_values:
            break
    if not only_values:
        states = {"q": query, "k": key, "v": value, "grad": grad, "out": out}
        series.in_halves(moves(problem, strength, states, dict.fromkeys(("dq", "dk", "dv"), own), pieces))
    return Plan(series, problem.states_shape, problem.states_strides, scratch=size)


def add_scaled_gradients(
    series: Series, problem: Problem, grad: Tensor, out: Tensor, *, in_parts: bool = True, **named: str
) -> None:
    """The output's gradient over the rows' normalisers; D of that, also in parts; powers of two kept apart."""
    numbers = {
        **strides("g", grad), **strides("o", out), **named_strides("s", problem.states_strides), "part_row": PARTS,
        **problem.numbers, **problem.constants, "blocks": ceil_div(problem.longest, 128), "ROWS": 128,
        "POWER": problem.splits_inverse, "PRECISE": problem.precise if in_parts else 2,
    }  # fmt: skip
    series.add(gradient_parts.scaled_gradients, problem.programs(128), numbers, **named)

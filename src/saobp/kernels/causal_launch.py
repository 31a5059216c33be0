"""Sizes and launches of the strict causal kernels, forward and backward."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from saobp.kernels import causal, causal_backward, causal_weak, causal_weak_backward, gradient_parts
from saobp.kernels.launch import scale_gradient
from saobp.kernels.problem import (
    Block,
    Problem,
    ceil_div,
    empty_states,
    given,
    next_power,
    resources,
    strides,
)
from saobp.kernels.start import start_kernel

SPAN = 8192
"""Rows whose keys' sums are held at once, a multiple of a tile's rows: bounded, so memory is linear in length."""

TILES = {
    "row_sums": Block(64, 64, 4, 3),
    "earlier_messages": Block(64, 128, 4, 3),
    "output": Block(64, 64, 4, 3),
    "weak_messages": Block(64, 64, 4, 3),
    "weak_output": Block(64, 64, 4, 3, 168),
    "weak_climb": Block(64, 64, 4, 3),
    "weak_query_gradient": Block(64, 64, 4, 3),
    "weak_prior_gradient": Block(64, 64, 4, 3, 168),
    "key_gradient": Block(64, 128, 8, 2),
    "query_gradient": Block(64, 64, 4, 2),
    "value_gradient": Block(64, 128, 8, 2),
}
"""For half types and head sizes up to 64, found on an H200; sweeps that hear share one number of rows."""


def causal_block(problem: Problem, sweep: str) -> Block:
    """Tile sizes. Sweeps that hear share one number of rows: the step at which keys' sums are kept."""
    if problem.dtype == torch.float32:
        return Block(32, 32, warps=8, stages=1)
    if problem.dim > 128:
        return Block(32, 32, warps=4, stages=1)  # 64 x 32 reads out of bounds on an H200 with Triton 3.6
    if problem.dim > 64:
        return Block(64, 64, warps=4, stages=2)
    return TILES[sweep]


def spans(problem: Problem) -> list[tuple[int, int]]:
    """The longest sequence's rows cut into spans; one span if rows do not hear each other."""
    step = SPAN if problem.hears else problem.longest
    return [(start, min(start + step, problem.longest)) for start in range(0, problem.longest, step)]


def span_slots(problem: Problem) -> int:
    """How many blocks of rows a span has at most."""
    return ceil_div(min(SPAN, problem.longest), causal_block(problem, "output").rows)


def is_weak(problem: Problem) -> bool:
    """Whether messages are weak, known to be, and lower beliefs: the kernels in half types may be used."""
    return problem.precise == 0 and problem.hears and problem.bound > 0


def needs_care(problem: Problem) -> bool:
    """Whether the kernels that keep a running maximum are needed: alone, or after those in half types."""
    return not is_weak(problem) or problem.may_underflow


def row_blocks(problem: Problem) -> int:
    """How many blocks of rows the longest sequence has."""
    return ceil_div(problem.longest, causal_block(problem, "output").rows)


def saved_shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Shapes of what the backward pass needs besides the output: lse, heard, belief, lowest; in float32 two parts."""
    lowest = problem.sequences * problem.heads * row_blocks(problem) if is_weak(problem) else 0
    return problem.lse_shape, problem.lse_shape if problem.hears else (0,), problem.lse_shape, (lowest,)


def lowest_numbers(problem: Problem, lowest: Tensor) -> dict[str, Any]:
    """Where kernels find out which heads, or blocks of rows, need care."""
    return {
        "lowest_ptr": lowest, "lowest_blocks": row_blocks(problem), "lowest_sum": problem.lowest_sum,
        "LOWEST_BLOCKS": next_power(row_blocks(problem)), "CHECKED": is_weak(problem) and problem.may_underflow,
    }  # fmt: skip


def sums(problem: Problem, device: torch.device, numbers: int) -> Tensor:
    """``[batch, heads, slots, length, numbers]``: so many numbers per block of a span's rows and key."""
    shape = (
        problem.batch,
        problem.heads,
        span_slots(problem),
        problem.length,
        numbers if problem.hears else 0,
    )
    return torch.empty(shape, dtype=torch.float32, device=device)


def programs(problem: Problem, tokens: int, step: int) -> int:
    """One program for every ``step`` of so many tokens, for every head of every sequence."""
    return ceil_div(tokens, step) * problem.sequences * problem.heads


def span_blocks(block: Block, tokens: int, step: int) -> dict[str, Any]:
    return {"blocks": ceil_div(tokens, step), "ROWS": block.rows, "KEYS": block.keys, **resources(block)}


@lru_cache
def _names(kernel: Any) -> frozenset[str]:
    return frozenset(kernel.arg_names)


def start_sweep(
    kernel: Any, problem: Problem, block: Block, tokens: int, step: int, **arguments: Any
) -> None:
    """A sweep with a program for every ``step`` of so many tokens, and those of the arguments that it takes."""
    taken = {name: value for name, value in arguments.items() if name in _names(kernel)}
    start_kernel(kernel, programs(problem, tokens, step), **taken, **span_blocks(block, tokens, step))


def run_causal_forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output and what the backward pass needs: lse, heard, belief, lowest."""
    out = empty_states(problem, query)
    lse, heard, belief, lowest = (
        torch.empty(shape, dtype=torch.float32, device=query.device) for shape in saved_shapes(problem)
    )
    weak = is_weak(problem)
    common: dict[str, Any] = {
        "q_ptr": query, "k_ptr": key, "v_ptr": value, "out_ptr": out, "strength_ptr": strength,
        "mask_ptr": given(mask, strength), "cu_ptr": given(cu, strength), "seed_ptr": given(seed, strength),
        "lse_ptr": lse, "past_ptr": sums(problem, query.device, 1), "heard_ptr": heard, "belief_ptr": belief,
        **strides("q", query), **strides("k", key), **strides("v", value), **strides("o", out),
        **problem.numbers, **problem.constants, **problem.drop_numbers, **problem.message_numbers,
        **lowest_numbers(problem, lowest), "low_plane": problem.low_plane, "slots": span_slots(problem),
        "HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
    }  # fmt: skip
    block = causal_block(problem, "row_sums")
    start_sweep(causal.causal_row_sums, problem, block, problem.longest, block.rows, **common)
    for start, stop in spans(problem):
        common |= {"span_start": start, "span_stop": stop}
        if problem.hears:
            kernel = causal_weak.weak_messages if weak else causal.earlier_messages
            block = causal_block(problem, "weak_messages" if weak else "earlier_messages")
            start_sweep(kernel, problem, block, stop, block.keys, **common)
        if weak:
            block = causal_block(problem, "weak_output")
            start_sweep(causal_weak.weak_output, problem, block, stop - start, block.rows, **common)
        if needs_care(problem):
            block = causal_block(problem, "output")
            start_sweep(causal.causal_output, problem, block, stop - start, block.rows, **common)
    return out, lse, heard, belief, lowest


def run_causal_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, heard: Tensor, belief: Tensor, lowest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma row by row, unless it is weak."""
    dq = empty_states(problem, query)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    own, dgamma = (torch.empty(problem.rows_shape, **floats) for _ in range(2))
    in_spans = spans(problem)
    # Over several spans dK and dV are summed up in memory, so in float32.
    exact = torch.empty((), **floats) if len(in_spans) > 1 else query
    dk, dv = (empty_states(problem, exact) for _ in range(2))
    # One way pairs the sums, the other keeps them apart; each is done with them before the other begins.
    both_sums = sums(problem, query.device, 2)
    past, later = both_sums.view(2, -1)
    common: dict[str, Any] = {
        "q_ptr": query, "k_ptr": key, "v_ptr": value, "strength_ptr": strength,
        "mask_ptr": given(mask, strength), "cu_ptr": given(cu, strength), "seed_ptr": given(seed, strength),
        "lse_ptr": lse, "belief_ptr": belief, "heard_ptr": heard.clone(),
        "sums_ptr": both_sums, "past_ptr": past, "later_ptr": later,
        "dq_ptr": dq, "dv_ptr": dv, "strength_grad_ptr": dgamma,
        **strides("q", query), **strides("k", key), **strides("v", value), **strides("d", dq),
        **problem.numbers, **problem.constants, **problem.drop_numbers, **problem.message_numbers,
        **lowest_numbers(problem, lowest), "low_plane": problem.low_plane, "slots": span_slots(problem),
        "scale": problem.scale, "HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
    }  # fmt: skip
    ways = []
    if is_weak(problem):
        scaled = scale_gradient(problem, grad, out, torch.exp2(-belief[0]), cu)
        dk_sums = dk if dk.dtype == torch.float32 else empty_states(problem, own)
        common["pairs_ptr"] = torch.stack((lse[0], scaled.delta), -1)
        common["term_pairs_ptr"] = torch.empty_like(common["pairs_ptr"])
        ways.append((_weak_span, scaled.gradient, scaled.delta, dk_sums))
    if needs_care(problem):
        ways.append((_careful_span, grad, _row_products(problem, grad, out, cu, own), dk))
    for start, stop in reversed(in_spans):
        common |= {"span_start": start, "span_stop": stop, "LAST": stop == problem.longest}
        for way, gradient, delta, keys_sums in ways:
            states = {"grad_ptr": gradient, "delta_ptr": delta, "own_ptr": own, "dk_ptr": keys_sums}
            way(problem, common | states | strides("g", gradient))
    if is_weak(problem):
        block = causal_block(problem, "weak_prior_gradient")
        start_sweep(
            causal_weak_backward.weak_prior_gradient, problem, block, problem.longest, block.keys,
            **common, **strides("s", dk_sums), dk_sums_ptr=dk_sums, dk_ptr=dk,
        )  # fmt: skip
    return dq, dk.to(query.dtype), dv.to(query.dtype), dgamma


def _careful_span(problem: Problem, common: dict[str, Any]) -> None:
    start, stop = common["span_start"], common["span_stop"]
    block = causal_block(problem, "value_gradient")
    start_sweep(causal_backward.causal_value_gradient, problem, block, stop, block.keys, **common)
    block = causal_block(problem, "query_gradient")
    start_sweep(causal_backward.causal_query_gradient, problem, block, stop - start, block.rows, **common)
    block = causal_block(problem, "key_gradient")
    start_sweep(causal_backward.causal_key_gradient, problem, block, stop, block.keys, **common)


def _weak_span(problem: Problem, common: dict[str, Any]) -> None:
    start, stop = common["span_start"], common["span_stop"]
    block = causal_block(problem, "weak_climb")
    start_sweep(
        causal_weak_backward.weak_climb,
        problem,
        block,
        stop,
        block.keys,
        **common,
        after_ptr=common["own_ptr"],
    )
    block = causal_block(problem, "weak_query_gradient")
    start_sweep(causal_weak_backward.weak_query_gradient, problem, block, stop - start, block.rows, **common)


def _row_products(problem: Problem, grad: Tensor, out: Tensor, cu: Tensor | None, like: Tensor) -> Tensor:
    """D = rowsum(dO * O)."""
    delta = torch.empty_like(like)
    start_kernel(
        gradient_parts.row_products, programs(problem, problem.longest, 128),
        grad_ptr=grad, out_ptr=out, cu_ptr=given(cu, like), delta_ptr=delta,
        **strides("g", grad), **strides("o", out),
        heads=problem.heads, length=problem.length, blocks=ceil_div(problem.longest, 128), ROWS=128,
        DIM=problem.dim, BLOCK_DIM=problem.constants["BLOCK_DIM"], PACKED=problem.packed,
    )  # fmt: skip
    return delta

"""Sizes and launches of the strict causal kernels, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saobp.kernels import causal, causal_backward, gradient_parts
from saobp.kernels.problem import Block, Problem, ceil_div, empty_states, given, resources, strides
from saobp.kernels.start import start_kernel

SPAN = 2048
"""Rows whose keys' sums are held at once, a multiple of a tile's rows: bounded, so memory is linear in length."""


def causal_block(problem: Problem, sweep: str) -> Block:
    """Tile sizes. Sweeps that hear share one number of rows: the step at which keys' sums are kept."""
    if problem.dtype == torch.float32:
        return Block(32, 32, warps=8, stages=1)
    if problem.dim > 128:
        return Block(32, 32, warps=4, stages=1)  # 64 x 32 reads out of bounds on an H200 with Triton 3.6
    if problem.dim > 64:
        return Block(64, 64, warps=4, stages=2)
    return {
        "row_sums": Block(128, 64, 4, 3),
        "earlier_messages": Block(64, 128, 4, 3),
        "output": Block(64, 64, 4, 3),
        "key_gradient": Block(64, 128, 8, 2),
        "query_gradient": Block(64, 64, 4, 2),
        "value_gradient": Block(64, 128, 8, 2),
    }[sweep]


def spans(problem: Problem) -> list[tuple[int, int]]:
    """The longest sequence's rows cut into spans; one span if rows do not hear each other."""
    step = SPAN if problem.hears else problem.longest
    return [(start, min(start + step, problem.longest)) for start in range(0, problem.longest, step)]


def span_slots(problem: Problem) -> int:
    """How many blocks of rows a span has at most."""
    return ceil_div(min(SPAN, problem.longest), causal_block(problem, "output").rows)


def saved_shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of what the backward pass needs besides the output: lse, heard, belief; in float32 two parts each."""
    return problem.lse_shape, problem.lse_shape if problem.hears else (0,), problem.lse_shape


def sums(problem: Problem, device: torch.device) -> Tensor:
    """``[batch, heads, slots, length]`` for one number per block of a span's rows and key."""
    shape = (problem.batch, problem.heads, span_slots(problem), problem.length) if problem.hears else (0,)
    return torch.empty(shape, dtype=torch.float32, device=device)


def programs(problem: Problem, tokens: int, step: int) -> int:
    """One program for every ``step`` of so many tokens, for every head of every sequence."""
    return ceil_div(tokens, step) * problem.sequences * problem.heads


def span_blocks(block: Block, tokens: int, step: int) -> dict[str, Any]:
    return {"blocks": ceil_div(tokens, step), "ROWS": block.rows, "KEYS": block.keys, **resources(block)}


def run_causal_forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output and what the backward pass needs: lse, heard, belief."""
    out = empty_states(problem, query)
    lse, heard, belief = (
        torch.empty(shape, dtype=torch.float32, device=query.device) for shape in saved_shapes(problem)
    )
    common: dict[str, Any] = {
        "q_ptr": query, "k_ptr": key, "mask_ptr": given(mask, strength), "cu_ptr": given(cu, strength), "lse_ptr": lse,
        **strides("q", query), **strides("k", key), **problem.numbers, **problem.constants,
        "low_plane": problem.low_plane, "PRECISE": problem.precise,
    }  # fmt: skip
    block = causal_block(problem, "row_sums")
    start_kernel(
        causal.causal_row_sums,
        programs(problem, problem.longest, block.rows),
        **common,
        **span_blocks(block, problem.longest, block.rows),
    )
    past = sums(problem, query.device)
    common |= {
        "strength_ptr": strength,
        "past_ptr": past,
        "slots": span_slots(problem),
        **problem.message_numbers,
    }
    for start, stop in spans(problem):
        if problem.hears:
            block = causal_block(problem, "earlier_messages")
            start_kernel(
                causal.earlier_messages,
                programs(problem, stop, block.keys),
                **common,
                **span_blocks(block, stop, block.keys),
                heard_ptr=heard,
                span_start=start,
                span_stop=stop,
            )
        block = causal_block(problem, "output")
        start_kernel(
            causal.causal_output, programs(problem, stop - start, block.rows),
            **common, **span_blocks(block, stop - start, block.rows), **strides("v", value), **strides("o", out),
            **problem.drop_numbers, v_ptr=value, out_ptr=out, seed_ptr=given(seed, strength), belief_ptr=belief,
            span_start=start, HEARS=problem.hears, DROPS=problem.dropout > 0,
        )  # fmt: skip
    return out, lse, heard, belief


def run_causal_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, heard: Tensor, belief: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma row by row."""
    dq = empty_states(problem, query)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    rows_shape = (problem.batch, problem.heads, problem.length)
    delta, own, dgamma = (torch.empty(rows_shape, **floats) for _ in range(3))
    constants = problem.constants
    start_kernel(
        gradient_parts.row_products, programs(problem, problem.longest, 128),
        grad_ptr=grad, out_ptr=out, cu_ptr=given(cu, strength), delta_ptr=delta,
        **strides("g", grad), **strides("o", out),
        heads=problem.heads, length=problem.length, blocks=ceil_div(problem.longest, 128), ROWS=128,
        DIM=constants["DIM"], BLOCK_DIM=constants["BLOCK_DIM"], PACKED=problem.packed,
    )  # fmt: skip
    common: dict[str, Any] = {
        "q_ptr": query, "k_ptr": key, "v_ptr": value, "grad_ptr": grad, "strength_ptr": strength,
        "mask_ptr": given(mask, strength), "cu_ptr": given(cu, strength), "seed_ptr": given(seed, strength),
        "lse_ptr": lse, "belief_ptr": belief, "delta_ptr": delta,
        "past_ptr": sums(problem, query.device), "later_ptr": sums(problem, query.device),
        **strides("q", query), **strides("k", key), **strides("v", value), **strides("g", grad), **strides("d", dq),
        **problem.numbers, **constants, **problem.drop_numbers, **problem.message_numbers,
        "low_plane": problem.low_plane, "slots": span_slots(problem),
        "HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
    }  # fmt: skip
    in_spans = spans(problem)
    # Over several spans dK and dV are summed up in memory, so in float32.
    exact = torch.empty((), **floats) if len(in_spans) > 1 else query
    dk, dv = (empty_states(problem, exact) for _ in range(2))
    heard = heard.clone()
    for start, stop in reversed(in_spans):
        last = stop == problem.longest
        block = causal_block(problem, "value_gradient")
        start_kernel(
            causal_backward.causal_value_gradient, programs(problem, stop, block.keys),
            **common, **span_blocks(block, stop, block.keys), span_start=start, span_stop=stop,
            heard_ptr=heard, own_ptr=own, dv_ptr=dv, LAST=last,
        )  # fmt: skip
        block = causal_block(problem, "query_gradient")
        start_kernel(
            causal_backward.causal_query_gradient, programs(problem, stop - start, block.rows),
            **common, **span_blocks(block, stop - start, block.rows), span_start=start,
            scale=problem.scale, dq_ptr=dq, strength_grad_ptr=dgamma,
        )  # fmt: skip
        block = causal_block(problem, "key_gradient")
        start_kernel(
            causal_backward.causal_key_gradient, programs(problem, stop, block.keys),
            **common, **span_blocks(block, stop, block.keys), span_start=start, span_stop=stop,
            scale=problem.scale, strength_grad_ptr=dgamma, dk_ptr=dk, LAST=last,
        )  # fmt: skip
    return dq, dk.to(query.dtype), dv.to(query.dtype), dgamma

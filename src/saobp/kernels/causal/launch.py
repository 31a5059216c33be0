"""Sizes and launches of the strict causal kernels, forward and backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saobp.kernels.bidirectional import gradient_terms
from saobp.kernels.bidirectional.launch import STATES, Plan, add_scaled_gradients, copies_tiles
from saobp.kernels.call_spec import (
    Block,
    Problem,
    ceil_div,
    given,
    named_strides,
    next_power,
    resources,
    strides,
    tensor_looks,
)
from saobp.kernels.causal import backward, forward, row_kernels, weak_backward, weak_forward
from saobp.kernels.runtime.launcher import Piece, Series, Tiles, lay_out, remembered

SPAN = 16384
"""Rows whose keys' sums are held at once, a multiple of a tile's rows: bounded, so memory is linear in length.

Half as many rows would be 2 % slower on an H200 at length 16384, and spare memory only from there on."""

SECTION, FEW = 1024, 8
"""Programs that blocks of several heads are sorted in, the longest first: some rounds of a GPU's, not all heads.

With few blocks a head (FEW or less: 512 tokens), neighbours that read the same states matter more (5 % on an H200).
"""

TILES = {
    "row_sums": Block(64, 64, 4, 3),
    "earlier_messages": Block(64, 128, 4, 3),
    "output": Block(64, 64, 4, 3),
    "weak_messages": Block(64, 64, 4, 3, 128),
    "weak_output": Block(64, 64, 4, 3, 168),
    "weak_climb": Block(64, 64, 4, 3),
    "weak_query_gradient": Block(64, 64, 4, 3),
    "weak_prior_gradient": Block(64, 64, 4, 3, 128),
    "key_gradient": Block(64, 128, 8, 2),
    "query_gradient": Block(64, 64, 4, 2),
    "value_gradient": Block(64, 128, 8, 2),
}
"""For half types and head sizes up to 64, found on an H200; sweeps that hear share one number of rows."""

FETCHED = {
    "row_sums": Block(64, 64, 4, 3, 72),
    "weak_messages": Block(64, 128, 4, 2, 168),
    "weak_climb": Block(64, 64, 4, 3),
    "weak_query_gradient": Block(64, 64, 4, 3),
    "weak_prior_gradient": Block(64, 64, 4, 3, 128),
}
"""Sweeps of weak strengths that leave their tiles to a GPU's copy engine, where it may fetch them, and what they take then.

Without addresses to keep, registers allow more programs on a multiprocessor, or fewer of them spill. Found on an H200;
the output's sweep is faster without.
"""


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


def sums_plane(problem: Problem) -> int:
    """How many numbers a head's sums are: one per block of a span's rows and key up to the block (``slot_place``)."""
    rows = causal_block(problem, "output").rows
    if not problem.hears:
        return 0
    if problem.packed:
        return ceil_div(min(SPAN, problem.longest), rows) * problem.length
    slots = [(start, ceil_div(stop - start, rows)) for start, stop in spans(problem)]
    return max(count * start + count * (count + 1) // 2 * rows for start, count in slots)


def is_weak(problem: Problem) -> bool:
    """Whether messages are weak, known to be, and lower beliefs: the kernels in half types may be used."""
    return problem.precise == 0 and problem.hears and problem.bound > 0


def fetches(problem: Problem, *states: Tensor) -> bool:
    """Whether the copy engine fetches tiles of these states in the sweeps that FETCHED names."""
    return is_weak(problem) and copies_tiles(problem, *states)


def needs_care(problem: Problem) -> bool:
    """Whether the kernels that keep a running maximum are needed: alone, or after those in half types."""
    return not is_weak(problem) or problem.may_underflow


def is_checked(problem: Problem) -> bool:
    """Whether each head is asked which of both kinds of kernels has to do it."""
    return is_weak(problem) and needs_care(problem)


def row_blocks(problem: Problem) -> int:
    """How many blocks of rows the longest sequence has."""
    return ceil_div(problem.longest, causal_block(problem, "output").rows)


def saved_pieces(problem: Problem) -> tuple[dict[str, Piece], int]:
    """What the backward pass needs besides the output, in one buffer; in float32 numbers have two parts."""
    floats, rows = torch.float32, problem.lse_shape
    lowest = problem.sequences * problem.heads * row_blocks(problem) if is_weak(problem) else 0
    return lay_out("saved", {
        "lse": (rows, floats), "heard": (rows if problem.hears else (0,), floats),
        "belief": (rows, floats), "lowest": ((lowest,), floats),
    }, apart=4)  # fmt: skip


def sums_shape(problem: Problem) -> tuple[int, int, int]:
    return (problem.batch, problem.heads, sums_plane(problem))


def run_causal_forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and in one buffer what the backward pass needs."""
    mapped = fetches(problem, query, key, value)
    looks = ("causal", mapped, causal_block, SPAN, *tensor_looks(query, key, value, strength, mask, cu, seed))
    plan = remembered(problem.plans, looks, plan_forward, problem, query, key, value, mapped)
    out = query.new_empty_strided(plan.sizes, plan.strides)
    saved = query.new_empty(plan.saved, dtype=torch.uint8)
    scratch = query.new_empty(plan.scratch, dtype=torch.uint8)
    plan.series(
        query, key, value, strength, given(mask, strength), given(cu, strength), given(seed, strength),
        out, saved, scratch,
    )  # fmt: skip
    return out, saved


def plan_forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor, mapped: bool) -> Plan:
    saved, saved_size = saved_pieces(problem)
    scratch, scratch_size = lay_out("scratch", {"past": (sums_shape(problem), torch.float32)})
    series = Series(query.device, (*STATES, "out", "saved", "scratch"), saved | scratch)
    sweeps = Sweeps(problem, series, _layouts(problem, query, key, value) if mapped else {})
    numbers = _numbers(problem, query, key, value)
    weak = is_weak(problem)
    sweeps.over_rows(forward.causal_row_sums, "row_sums", problem.longest, numbers)
    for start, stop in spans(problem):
        numbers |= {"span_start": start, "span_stop": stop}
        if problem.hears and weak:
            sweeps.over_keys(weak_forward.weak_messages, "weak_messages", stop, numbers)
        elif problem.hears:
            sweeps.over_keys(forward.earlier_messages, "earlier_messages", stop, numbers)
        if weak:
            sweeps.over_rows(weak_forward.weak_output, "weak_output", stop - start, numbers)
        if needs_care(problem):
            sweeps.over_rows(forward.causal_output, "output", stop - start, numbers)
    return Plan(series, problem.states_shape, problem.states_strides, saved_size, scratch_size)


Layouts = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def _layouts(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Layouts:
    """Shapes and strides of what weak sweeps fetch tiles of, by the names of their arguments."""
    views = {name: (tuple(one.shape), one.stride()) for name, one in (("q", query), ("k", key), ("v", value))}
    return {**views, "grad": (problem.states_shape, problem.states_strides)}


class Sweeps(NamedTuple):
    """Adds sweeps over so many tokens to a series: a program for each block of rows, or of keys, of every head.

    ``layouts`` are of the states that the copy engine may fetch tiles of.
    """

    problem: Problem
    series: Series
    layouts: Layouts

    def over_rows(self, kernel: Any, sweep: str, tokens: int, numbers: dict[str, Any], **named: str) -> None:
        self._add(kernel, sweep, tokens, numbers, named, by_rows=True)

    def over_keys(self, kernel: Any, sweep: str, tokens: int, numbers: dict[str, Any], **named: str) -> None:
        self._add(kernel, sweep, tokens, numbers, named, by_rows=False)

    def _add(
        self, kernel: Any, sweep: str, tokens: int, numbers: dict[str, Any], named: dict[str, str], *, by_rows: bool
    ) -> None:  # fmt: skip
        mapped = bool(self.layouts) and sweep in FETCHED
        block = FETCHED[sweep] if mapped else causal_block(self.problem, sweep)
        count = ceil_div(tokens, block.rows if by_rows else block.keys)
        sizes = {
            "blocks": count,
            "section": 1 if count <= FEW else max(1, SECTION // count),
            "ROWS": block.rows,
            "KEYS": block.keys,
            "MAPPED": mapped,
            **resources(block),
        }
        programs = count * self.problem.sequences * self.problem.heads
        self.series.add(
            kernel, programs, numbers | sizes, self._tiles(kernel, block) if mapped else None, **named
        )

    def _tiles(self, kernel: Any, block: Block) -> dict[str, Tiles]:
        """Of all that the kernel has a map of."""
        names = [name.removesuffix("_map") for name in kernel.arg_names if name.endswith("_map")]
        rows = {"q": block.rows, "grad": block.rows, "k": block.keys, "v": block.keys}
        return {name: Tiles(*self.layouts[name], (1, 1, rows[name], self.problem.dim)) for name in names}


def _numbers(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """What the sweeps share; with it kernels find out which heads, or blocks of rows, need care."""
    own = problem.states_strides
    return {
        **strides("q", query), **strides("k", key), **strides("v", value), **named_strides("o", own), **named_strides("d", own),
        **problem.numbers, **problem.constants, **problem.drop_numbers, **problem.message_numbers,
        "low_plane": problem.low_plane, "sums_plane": sums_plane(problem), "scale": problem.scale,
        "HEARS": problem.hears, "PRECISE": problem.precise, "DROPS": problem.dropout > 0,
        "lowest_blocks": row_blocks(problem), "lowest_sum": problem.lowest_sum, "CHECKED": is_checked(problem),
    }  # fmt: skip


def run_causal_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor,
    mask: Tensor | None, cu: Tensor | None, seed: Tensor | None, out: Tensor, saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv with one key head per query head, and the gradient of gamma row by row, unless it is weak."""
    mapped = fetches(problem, query, key, value)
    looks = (
        "causal backward", mapped, causal_block, SPAN, grad.stride(), grad.dtype, out.stride(),
        *tensor_looks(query, key, value, strength, mask, cu, seed),
    )  # fmt: skip
    plan = remembered(problem.plans, looks, plan_backward, problem, grad, query, key, value, out, mapped)
    dq = query.new_empty_strided(plan.sizes, plan.strides)
    dk, dv = [query.new_empty_strided(plan.sizes, plan.strides, dtype=plan.keys_dtype) for _ in range(2)]
    dgamma = query.new_empty(problem.rows_shape, dtype=torch.float32)
    scratch = query.new_empty(plan.scratch, dtype=torch.uint8)
    plan.series(
        query, key, value, strength, given(mask, strength), given(cu, strength), given(seed, strength),
        grad, out, saved, dq, dk, dv, dgamma, scratch,
    )  # fmt: skip
    if plan.keys_dtype != query.dtype:
        dk, dv = dk.to(query.dtype), dv.to(query.dtype)
    return dq, dk, dv, dgamma


def plan_backward(
    problem: Problem, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, mapped: bool
) -> Plan:
    in_spans = spans(problem)
    # Over several spans dK and dV are summed up in memory, so in float32.
    keys_dtype = torch.float32 if len(in_spans) > 1 else query.dtype
    dk_sums = "dk" if keys_dtype == torch.float32 else "dk_sums"
    weak, careful = is_weak(problem), needs_care(problem)
    scratch, size = _scratch_pieces(problem, query.dtype, dk_sums)
    # One way pairs the sums, the other keeps them apart; each is done with them before the other begins.
    pieces = saved_pieces(problem)[0] | scratch | {"sums": scratch["past"]}
    series = Series(query.device, BACKWARD_TENSORS, pieces)
    sweeps = Sweeps(problem, series, _layouts(problem, query, key, value) if mapped else {})
    _add_preparations(series, problem, grad, out)
    numbers = _numbers(problem, query, key, value)
    weak_numbers = numbers | named_strides("g", problem.states_strides)
    careful_numbers = numbers | strides("g", grad)
    for start, stop in reversed(in_spans):
        span = {"span_start": start, "span_stop": stop, "LAST": stop == problem.longest}
        if weak:
            _add_weak_span(sweeps, weak_numbers | span, dk_sums)
        if careful:
            _add_careful_span(sweeps, careful_numbers | span)
    if weak:
        sweeps.over_keys(
            weak_backward.weak_prior_gradient, "weak_prior_gradient", problem.longest,
            numbers | named_strides("s", problem.states_strides), dk_sums=dk_sums,
        )  # fmt: skip
    return Plan(series, problem.states_shape, problem.states_strides, scratch=size, keys_dtype=keys_dtype)


BACKWARD_TENSORS = (*STATES, "grad", "out", "saved", "dq", "dk", "dv", "strength_grad", "scratch")


def _scratch_pieces(problem: Problem, dtype: torch.dtype, dk_sums: str) -> tuple[dict[str, Piece], int]:
    floats, rows, states = torch.float32, problem.rows_shape, problem.states_shape
    pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "past": (sums_shape(problem), floats), "later": (sums_shape(problem), floats), "own": (rows, floats),
        "heard_left": (problem.lse_shape if problem.hears else (0,), floats), "inverse": ((0,), floats),
        "head_lowest": ((problem.sequences * problem.heads if is_checked(problem) else 0,), floats),
    }  # fmt: skip
    if is_weak(problem):
        pieces |= {
            "inverse": (rows, floats), "scaled": (states, dtype), "delta": (rows, floats),
            "pairs": ((*rows, 2), floats), "term_pairs": ((*rows, 2), floats),
        }  # fmt: skip
        if dk_sums == "dk_sums":
            pieces["dk_sums"] = (states, floats)
    if needs_care(problem):
        pieces["careful_delta"] = (rows, floats)
    return lay_out("scratch", pieces)


def _add_preparations(series: Series, problem: Problem, grad: Tensor, out: Tensor) -> None:
    """What sweeps need row by row."""
    weak, size = is_weak(problem), 1024
    if problem.hears:
        count = math.prod(problem.lse_shape)
        numbers = {"count": count, "SIZE": size, "WEAK": weak}
        series.add(row_kernels.prepared_rows, ceil_div(count, size), numbers)
    if weak:
        # The parts of D are not for these sweeps.
        add_scaled_gradients(series, problem, grad, out, in_parts=False, parts="scaled", power="delta")
        count = math.prod(problem.rows_shape)
        series.add(row_kernels.paired_rows, ceil_div(count, size), {"count": count, "SIZE": size})
    if is_checked(problem):
        count = row_blocks(problem)
        numbers = {"blocks": count, "BLOCKS": next_power(count)}
        series.add(row_kernels.lowest_of_heads, problem.sequences * problem.heads, numbers)
    if needs_care(problem):
        numbers = {
            **strides("g", grad), **strides("o", out), **problem.numbers, **problem.constants,
            "blocks": ceil_div(problem.longest, 128), "ROWS": 128,
        }  # fmt: skip
        series.add(gradient_terms.row_products, problem.programs(128), numbers, delta="careful_delta")


def _add_weak_span(sweeps: Sweeps, numbers: dict[str, Any], dk_sums: str) -> None:
    start, stop = numbers["span_start"], numbers["span_stop"]
    sweeps.over_keys(
        weak_backward.weak_climb, "weak_climb", stop, numbers,
        grad="scaled", heard="heard_left", after="own", dk=dk_sums,
    )  # fmt: skip
    kernel = weak_backward.weak_query_gradient
    sweeps.over_rows(kernel, "weak_query_gradient", stop - start, numbers, grad="scaled")


def _add_careful_span(sweeps: Sweeps, numbers: dict[str, Any]) -> None:
    start, stop = numbers["span_start"], numbers["span_stop"]
    named = {"delta": "careful_delta", "heard": "heard_left"}
    sweeps.over_keys(backward.causal_value_gradient, "value_gradient", stop, numbers, **named)
    sweeps.over_rows(backward.causal_query_gradient, "query_gradient", stop - start, numbers, **named)
    sweeps.over_keys(backward.causal_key_gradient, "key_gradient", stop, numbers, **named)

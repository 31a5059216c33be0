"""Strict causal attention on long sequences: tile sizes and launches of the sweeps, forward and backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saobp.kernels.bidirectional import gradient_terms
from saobp.kernels.bidirectional.launch import add_scaled_gradients
from saobp.kernels.call_spec import (
    Block,
    CallSpec,
    CallTensors,
    ceil_div,
    named_strides,
    next_power_of_2,
    resources,
    strides,
)
from saobp.kernels.calls import KernelChoice
from saobp.kernels.causal import backward, forward, row_kernels, stored_backward, weak_backward, weak_forward
from saobp.kernels.dispatch import select_kernels
from saobp.kernels.hopper.launch import add_causal_launch
from saobp.kernels.runtime.family import INPUT_NAMES, KernelFamily, LaunchPlan, Saved
from saobp.kernels.runtime.launcher import (
    BufferSlice,
    LaunchSequence,
    TileDescriptor,
    kernels_for,
    lay_out_buffer,
)

SPAN = 16384
"""Rows per span, a multiple of a tile's rows. Each key's message sum before every block of a span is stored (``past``); longer
sequences take several spans, so memory is linear in length. Half as many rows are 2 % slower on an H200 at length 16384,
and save memory only beyond that length."""

SECTION, FEW = 1024, 8
"""Causal blocks differ in work, so programs are sorted, the longest first: within sections of about SECTION programs,
a few times as many as a GPU runs at once, rather than over all heads, which would scatter reads of the same states.
With at most FEW blocks per head (512 tokens) heads are not mixed at all (5 % faster on an H200)."""

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
    "stored_mean_parts": Block(64, 64, 4, 3),
    "stored_row_means": Block(64, 64, 4, 1),
    "stored_climb": Block(64, 64, 4, 3),
    "stored_query_gradient": Block(64, 64, 4, 3, 168),
    "stored_key_gradient": Block(64, 64, 4, 3, 168),
}
"""Tiles for half types and head sizes up to 64, found on an H200; those of ``stored_query_gradient`` and ``stored_key_gradient`` by
counting instructions. Sweeps with messages share one number of rows."""

STRONG_ATTRACTION = -1.0
"""Below this gamma of the factor ``low``, and where gamma is unknown, the stored sweeps compute D in float32."""

FETCHED = {
    "row_sums": Block(64, 64, 4, 3, 72),
    "weak_messages": Block(64, 128, 4, 2, 168),
    "weak_climb": Block(64, 64, 4, 3),
    "weak_query_gradient": Block(64, 64, 4, 3),
    "weak_prior_gradient": Block(64, 64, 4, 3, 128),
}
"""Sweeps of weak strengths that fetch tiles by TMA where possible, and their tile sizes then.

That saves the registers of addresses: more programs per multiprocessor, or less spilling. Found on an H200; the sweep
of the output is faster without.
"""


def causal_block(spec: CallSpec, sweep: str) -> Block:
    """Tile of a sweep. Those with messages share one number of rows, since ``past`` has an entry for each block of rows and key."""
    if spec.dtype == torch.float32:
        return Block(32, 32, warps=8, stages=1)
    if spec.dim > 128:
        return Block(32, 32, warps=4, stages=1)  # 64 x 32 reads out of bounds on an H200 with Triton 3.6
    if spec.dim > 64:
        return Block(64, 64, warps=4, stages=2)
    return TILES[sweep]


def spans(spec: CallSpec) -> list[tuple[int, int]]:
    """The longest sequence's rows cut into spans; one span if rows exchange no messages."""
    step = SPAN if spec.receives else spec.longest
    return [(start, min(start + step, spec.longest)) for start in range(0, spec.longest, step)]


def sums_plane(spec: CallSpec) -> int:
    """Numbers of a head's ``past``: one per block of a span's rows and key up to that block (``slot_place``)."""
    rows = causal_block(spec, "output").rows
    if not spec.receives:
        return 0
    if spec.packed:
        return ceil_div(min(SPAN, spec.longest), rows) * spec.length
    slots = [(start, ceil_div(stop - start, rows)) for start, stop in spans(spec)]
    return max(count * start + count * (count + 1) // 2 * rows for start, count in slots)


def choose(spec: CallSpec) -> KernelChoice:
    """The choice from the call's scalars alone: ``weak`` and ``careful``."""
    return select_kernels("causal", spec)


def row_blocks(spec: CallSpec) -> int:
    """How many blocks of rows the longest sequence has."""
    return ceil_div(spec.longest, causal_block(spec, "output").rows)


def saved_slices(spec: CallSpec, buffer: str = "saved") -> tuple[dict[str, BufferSlice], int]:
    """Vectors that the backward pass needs, in one buffer; in float32 numbers have two parts."""
    floats, rows = torch.float32, spec.lse_shape
    lowest = spec.sequences * spec.heads * row_blocks(spec) if choose(spec).weak else 0
    return lay_out_buffer(buffer, {
        "lse": (rows, floats), "message_sums": (rows if spec.receives else (0,), floats),
        "belief": (rows, floats), "lowest": ((lowest,), floats),
    }, alignment=4)  # fmt: skip


def sums_shape(spec: CallSpec) -> tuple[int, int, int]:
    """Shape of ``past`` and ``later``."""
    return (spec.batch, spec.heads, sums_plane(spec))


def attracts(spec: CallSpec) -> bool:
    """Whether the stored sweeps sum up D in float32."""
    return choose(spec).stored and spec.sign < 0 and not STRONG_ATTRACTION < spec.bound < 0


def needs_rest(spec: CallSpec) -> bool:
    """Whether D needs what rounding the output to a half type left (``rest``).

    With strong messages of either sign refined rows are unlike their priors, along which an error of D is taken out.
    """
    half = spec.dtype != torch.float32
    return half and spec.receives > 0 and not choose(spec).weak and not attracts(spec)


def saved_tensors(spec: CallSpec) -> Saved:
    rest = spec.states_shape if needs_rest(spec) else (0,)
    return {"saved": ((saved_slices(spec)[1],), torch.uint8), "rest": (rest, spec.dtype)}


def plan_forward(spec: CallSpec, tensors: CallTensors, saves: bool) -> LaunchPlan:
    query, key, value, *_ = tensors
    choice = kernels_for("causal", spec, query, key, value)
    rests = saves and needs_rest(spec)
    buffers, unused = ("saved", "rest") if saves else (), {} if rests else {"rest": "out"}
    # For inference alone ``saved`` is the start of the scratch buffer.
    saved, size = saved_slices(spec, "saved" if saves else "scratch")
    start = 0 if saves else size
    wanted: Saved = {} if choice.hopper else {"past": (sums_shape(spec), torch.float32)}
    if choice.hopper and not choice.weak:  # the smallest normalisers, which weak kernels need backward
        wanted = {"lowest": ((spec.sequences * spec.heads * row_blocks(spec),), torch.float32)}
    scratch, scratch_size = lay_out_buffer("scratch", wanted, start=start)
    launches = LaunchSequence(query.device, (*INPUT_NAMES, "out", *buffers, "scratch"), saved | scratch)
    if choice.hopper:
        records = choice.weak and choice.careful
        add_causal_launch(launches, spec, query, key, value, records, rests, unused)
        return LaunchPlan(launches, scratch_size)
    sweeps = Sweeps(spec, launches, _layouts(spec, query, key, value) if choice.tma else {})
    numbers = _numbers(spec, query, key, value) | {"RESTS": rests}
    sweeps.over_rows(forward.causal_row_sums, "row_sums", spec.longest, numbers)
    for start, stop in spans(spec):
        numbers |= {"span_start": start, "span_stop": stop}
        if spec.receives and choice.weak:
            sweeps.over_keys(weak_forward.weak_messages, "weak_messages", stop, numbers)
        elif spec.receives:
            sweeps.over_keys(forward.earlier_messages, "earlier_messages", stop, numbers)
        if choice.weak:
            sweeps.over_rows(weak_forward.weak_output, "weak_output", stop - start, numbers)
        if choice.careful:
            sweeps.over_rows(forward.causal_output, "output", stop - start, numbers, **unused)
    return LaunchPlan(launches, scratch_size)


Layouts = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def _layouts(spec: CallSpec, query: Tensor, key: Tensor, value: Tensor) -> Layouts:
    """Shapes and strides of the states that weak sweeps fetch tiles of, by argument name."""
    views = {name: (tuple(one.shape), one.stride()) for name, one in (("q", query), ("k", key), ("v", value))}
    return {**views, "grad": (spec.states_shape, spec.states_strides)}


class Sweeps(NamedTuple):
    """Adds sweeps over ``tokens`` tokens to a launch sequence: one program per block of rows, or of keys, of every head.

    ``layouts`` describes the states that TMA may fetch tiles of.
    """

    spec: CallSpec
    launches: LaunchSequence
    layouts: Layouts

    def over_rows(self, kernel: Any, sweep: str, tokens: int, numbers: dict[str, Any], **named: str) -> None:
        self._add(kernel, sweep, tokens, numbers, named, by_rows=True)

    def over_keys(self, kernel: Any, sweep: str, tokens: int, numbers: dict[str, Any], **named: str) -> None:
        self._add(kernel, sweep, tokens, numbers, named, by_rows=False)

    def _add(
        self, kernel: Any, sweep: str, tokens: int, numbers: dict[str, Any], named: dict[str, str], *, by_rows: bool
    ) -> None:  # fmt: skip
        mapped = bool(self.layouts) and sweep in FETCHED
        block = FETCHED[sweep] if mapped else causal_block(self.spec, sweep)
        count = ceil_div(tokens, block.rows if by_rows else block.keys)
        sizes = {
            "blocks": count,
            "section": 1 if count <= FEW else max(1, SECTION // count),
            "ROWS": block.rows,
            "KEYS": block.keys,
            "MAPPED": mapped,
            **resources(block),
        }
        programs = count * self.spec.sequences * self.spec.heads
        self.launches.add(
            kernel, programs, numbers | sizes, self._tiles(kernel, block) if mapped else None, **named
        )

    def _tiles(self, kernel: Any, block: Block) -> dict[str, TileDescriptor]:
        """A descriptor for each state that the kernel has a ``_map`` argument for."""
        names = [name.removesuffix("_map") for name in kernel.arg_names if name.endswith("_map")]
        rows = {"q": block.rows, "grad": block.rows, "k": block.keys, "v": block.keys}
        return {
            name: TileDescriptor(*self.layouts[name], (1, 1, rows[name], self.spec.dim)) for name in names
        }


def _numbers(spec: CallSpec, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Arguments common to the sweeps, among them those by which kernels find heads or blocks of rows that may have underflowed."""
    out_strides, choice = spec.states_strides, choose(spec)
    return {
        **strides("q", query), **strides("k", key), **strides("v", value), **named_strides("o", out_strides),
        **named_strides("d", spec.gradient_strides),
        **spec.numbers, **spec.constants, **spec.drop_numbers, **spec.message_numbers,
        "low_plane": spec.low_plane, "sums_plane": sums_plane(spec), "scale": spec.scale,
        "RECEIVES": spec.receives, "PRECISE": spec.precise, "DROPS": spec.dropout > 0,
        "lowest_blocks": row_blocks(spec), "lowest_sum": spec.lowest_sum, "CHECKED": choice.weak and choice.careful,
    }  # fmt: skip


BACKWARD_NAMES = (*INPUT_NAMES, "grad", "out", "saved", "rest", "dq", "dk", "dv", "strength_grad", "scratch")


def plan_backward(spec: CallSpec, tensors: CallTensors, grad: Tensor, out: Tensor) -> LaunchPlan:
    query, key, value, *_ = tensors
    choice = kernels_for("causal", spec, query, key, value)
    if choice.stored:
        return _plan_stored(spec, query, key, value, grad, out)
    in_spans = spans(spec)
    # Over several spans dK and dV are accumulated in memory, so in float32.
    keys_dtype = torch.float32 if len(in_spans) > 1 else query.dtype
    dk_sums = "dk" if keys_dtype == torch.float32 else "dk_sums"
    scratch, size = _scratch_slices(spec, query.dtype, dk_sums)
    # Weak kernels store the sums interleaved, careful ones separately; one set finishes before the other starts.
    slices = saved_slices(spec)[0] | scratch | {"sums": scratch["past"]}
    launches = LaunchSequence(query.device, BACKWARD_NAMES, slices)
    sweeps = Sweeps(spec, launches, _layouts(spec, query, key, value) if choice.tma else {})
    _add_preparations(launches, spec, grad, out)
    numbers = _numbers(spec, query, key, value)
    weak_numbers = numbers | named_strides("g", spec.states_strides)
    careful_numbers = numbers | strides("g", grad)
    for start, stop in reversed(in_spans):
        span = {"span_start": start, "span_stop": stop, "LAST": stop == spec.longest}
        if choice.weak:
            _add_weak_span(sweeps, weak_numbers | span, dk_sums)
        if choice.careful:
            _add_careful_span(sweeps, careful_numbers | span)
    if choice.weak:
        sweeps.over_keys(
            weak_backward.weak_prior_gradient, "weak_prior_gradient", spec.longest,
            numbers | named_strides("s", spec.gradient_strides), dk_sums=dk_sums,
        )  # fmt: skip
    return LaunchPlan(launches, size, keys_dtype)


def _plan_stored(
    spec: CallSpec, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, out: Tensor
) -> LaunchPlan:
    """Sweeps that store the gradients of scores, for every block of rows and each key up to its last."""
    rows = causal_block(spec, "stored_climb").rows
    count = ceil_div(spec.longest, rows)
    # As ``slot_place`` counts.
    plane = count * spec.length if spec.packed else count * (count + 1) // 2 * rows
    scratch, size = lay_out_buffer("scratch", {
        "terms": ((*spec.rows_shape[:2], plane, rows), query.dtype), "careful_delta": (spec.rows_shape, torch.float32),
        "term_pairs": ((*spec.rows_shape, 2), torch.float32),
        "mean_parts": ((*spec.rows_shape[:2], count if attracts(spec) else 0, spec.length, 2), torch.float32),
    })  # fmt: skip
    launches = LaunchSequence(query.device, BACKWARD_NAMES, saved_slices(spec)[0] | scratch)
    sweeps = Sweeps(spec, launches, {})
    numbers = _numbers(spec, query, key, value) | strides("g", grad)
    numbers |= {"sums_plane": plane, "LEARNS": not spec.bound, "TAIL": spec.packed or spec.length % rows != 0}
    numbers |= {"ATTRACTS": attracts(spec), "RESTS": needs_rest(spec)}
    kernels = stored_backward
    if attracts(spec):
        sweeps.over_keys(kernels.stored_mean_parts, "stored_mean_parts", spec.longest, numbers)
        sweeps.over_rows(
            kernels.stored_row_means, "stored_row_means", spec.longest, numbers, delta="careful_delta"
        )
    else:
        _add_row_products(launches, spec, grad, out)
    sweeps.over_keys(kernels.stored_climb, "stored_climb", spec.longest, numbers, delta="careful_delta")
    sweeps.over_rows(kernels.stored_query_gradient, "stored_query_gradient", spec.longest, numbers)
    sweeps.over_keys(kernels.stored_key_gradient, "stored_key_gradient", spec.longest, numbers)
    return LaunchPlan(launches, size)


def _scratch_slices(spec: CallSpec, dtype: torch.dtype, dk_sums: str) -> tuple[dict[str, BufferSlice], int]:
    floats, rows, states = torch.float32, spec.rows_shape, spec.states_shape
    choice = choose(spec)
    slices: Saved = {
        "past": (sums_shape(spec), floats), "later": (sums_shape(spec), floats), "key_delta": (rows, floats),
        "remaining_sums": (spec.lse_shape if spec.receives else (0,), floats), "inverse": ((0,), floats),
        "head_lowest": ((spec.sequences * spec.heads if choice.weak and choice.careful else 0,), floats),
    }  # fmt: skip
    if choice.weak:
        slices |= {
            "inverse": (rows, floats), "scaled": (states, dtype), "delta": (rows, floats),
            "pairs": ((*rows, 2), floats), "term_pairs": ((*rows, 2), floats),
        }  # fmt: skip
        if dk_sums == "dk_sums":
            slices["dk_sums"] = (states, floats)
    if choice.careful:
        slices["careful_delta"] = (rows, floats)
    return lay_out_buffer("scratch", slices)


def _add_preparations(launches: LaunchSequence, spec: CallSpec, grad: Tensor, out: Tensor) -> None:
    """Adds the kernels that compute per-row inputs of the sweeps."""
    choice, size = choose(spec), 1024
    if spec.receives:
        count = math.prod(spec.lse_shape)
        numbers = {"count": count, "SIZE": size, "WEAK": choice.weak}
        launches.add(row_kernels.prepared_rows, ceil_div(count, size), numbers)
    if choice.weak:
        # These sweeps do not use the parts of D.
        add_scaled_gradients(launches, spec, grad, out, in_parts=False, parts="scaled", power="delta")
        count = math.prod(spec.rows_shape)
        launches.add(row_kernels.paired_rows, ceil_div(count, size), {"count": count, "SIZE": size})
    if choice.weak and choice.careful:
        count = row_blocks(spec)
        numbers = {"blocks": count, "BLOCKS": next_power_of_2(count)}
        launches.add(row_kernels.lowest_of_heads, spec.sequences * spec.heads, numbers)
    if choice.careful:
        _add_row_products(launches, spec, grad, out)


def _add_row_products(launches: LaunchSequence, spec: CallSpec, grad: Tensor, out: Tensor) -> None:
    numbers = {
        **strides("g", grad), **strides("o", out), **spec.numbers, **spec.constants,
        "blocks": ceil_div(spec.longest, 128), "ROWS": 128, "RESTS": needs_rest(spec),
    }  # fmt: skip
    launches.add(gradient_terms.row_products, spec.programs(128), numbers, delta="careful_delta")


def _add_weak_span(sweeps: Sweeps, numbers: dict[str, Any], dk_sums: str) -> None:
    start, stop = numbers["span_start"], numbers["span_stop"]
    sweeps.over_keys(
        weak_backward.weak_climb, "weak_climb", stop, numbers,
        grad="scaled", message_sums="remaining_sums", after="key_delta", dk=dk_sums,
    )  # fmt: skip
    kernel = weak_backward.weak_query_gradient
    sweeps.over_rows(kernel, "weak_query_gradient", stop - start, numbers, grad="scaled")


def _add_careful_span(sweeps: Sweeps, numbers: dict[str, Any]) -> None:
    start, stop = numbers["span_start"], numbers["span_stop"]
    named = {"delta": "careful_delta", "message_sums": "remaining_sums"}
    sweeps.over_keys(backward.causal_value_gradient, "value_gradient", stop, numbers, **named)
    sweeps.over_rows(backward.causal_query_gradient, "query_gradient", stop - start, numbers, **named)
    sweeps.over_keys(backward.causal_key_gradient, "key_gradient", stop, numbers, **named)


CAUSAL = KernelFamily(
    "causal",
    "causal_refined_attention",
    saved=saved_tensors,
    plan_forward=plan_forward,
    plan_backward=plan_backward,
    inference="causal_refined_output",
)

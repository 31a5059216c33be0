"""Launches of a decoding step, as an operator that returns the output and the new sums of messages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saobp.kernels import dispatch
from saobp.kernels.call_spec import ceil_div, next_power_of_2
from saobp.kernels.decoding.step import VECTOR, attend_part, finish_row
from saobp.kernels.runtime.custom_op import operator
from saobp.kernels.runtime.launcher import (
    LaunchSequence,
    cached,
    compute_capability,
    lay_out_buffer,
    multiprocessors,
)

LINE = 64
"""Rows of message sums are a multiple of this many numbers apart; kernels rely on 16."""

CACHE_LINE = 128
"""Bytes of a cache line of the GPU; tensors in the scratch buffer begin at multiples."""


class StepBlock(NamedTuple):
    """Launch of a step.

    keys, warps, stages: tile of ``attend_part``
    programs:            its programs per multiprocessor
    finish_keys:         keys of a program of ``finish_row``
    """

    keys: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 2
    finish_keys: int = 2048


HALF, FULL = StepBlock(), StepBlock(32, 4, 1)
"""For half types, the fastest found on an H200, and for float32."""
HOPPER_STEP = StepBlock(32, 1, 2, 6, 1024)
"""For half types on Hopper: 34 KiB of shared memory a program, with heads of 128."""


def hopper_kernel() -> Any:
    """Imported on first use: other versions of Triton may lack the Gluon API it needs."""
    from saobp.kernels.decoding.hopper_step import attend_part_hopper

    return attend_part_hopper


def has_hopper_step(dtype: torch.dtype, dim: int, group: int, device: torch.device) -> bool:
    """Whether ``attend_part_hopper`` can do a step, with ``group`` query heads for each key head."""
    fits = dtype != torch.float32 and dim in (64, 128) and group <= 8
    return fits and dispatch.has_hopper_kernel(compute_capability(device))


def decoding_step(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, past: Tensor | None, mask: Tensor | None,
    scale: float, sign: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output ``[batch, heads, 1, dim]`` and sums of log messages ``[batch, heads, keys]`` after the row.

    query ``[batch, heads, 1, dim]``, key and value ``[batch, key_heads, keys, dim]``, strength ``[heads]``
    past: the sums before the row, ``[batch, heads, up to keys]``; 0 for keys beyond
    mask: int8 or bool ``[batch or 1, keys or more]`` or ``[batch or 1, 1, 1, keys or more]``: 0 hidden, 1 seen, 2 seen by a
    padding row, which sends no message
    """
    step: tuple[Tensor, Tensor] = STEP(query, key, value, strength, past, mask, scale, sign)
    return step


def _totals(query: Tensor, keys: int) -> Tensor:
    """An empty tensor for sums of messages ``[batch, heads, keys]`` with aligned rows, which kernels fill up to a vector's end."""
    batch, heads = query.shape[:2]
    return query.new_empty((batch, heads, _totals_line(keys)), dtype=torch.float32)[..., :keys]


def _totals_line(keys: int) -> int:
    """Row stride, in numbers, of new message sums for this many keys."""
    return ceil_div(keys, LINE) * LINE


def _shapes(
    query: Tensor, key: Tensor, _value: Tensor, _strength: Tensor, _past: Tensor | None, _mask: Tensor | None,
    _scale: float, _sign: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return query.new_empty(query.shape), _totals(query, key.shape[2])


class StepLayout(NamedTuple):
    """All that the launches of a step depend on but addresses: the key of its plan.

    dtypes:     of query, key, value and strength; ``past`` is float32, a mask int8
    past_line:  row stride of ``past``
    mask_batch: batch stride of the mask, 0 if one row serves all
    """

    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    query_strides: tuple[int, ...]
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    past_keys: int
    past_line: int
    masked: bool
    mask_batch: int
    scale: float
    sign: float


class StepPlan(NamedTuple):
    """Both launches of a step, which are given its tensors in each call and keep none, and the bytes of scratch memory."""

    launches: LaunchSequence
    scratch_bytes: int


TENSORS = ("q", "k", "v", "mask", "past", "strength", "totals", "out", "scratch")
"""Kernel argument names of the tensors of a step."""
_plans: dict[StepLayout, StepPlan] = {}
_binaries: dict[Any, dict[Any, Any]] = {}
"""Compiled kernels, which plans share: by what they are compiled for, then by the alignment of addresses."""


def _step(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, past: Tensor | None, mask: Tensor | None,
    scale: float, sign: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    query, key, value = _aligned(query), _aligned(key), _aligned(value)
    totals = _totals(query, key.shape[2])
    past_keys = 0 if past is None else past.shape[2]
    if past is None:
        past = totals
    elif not _is_readable(past):
        past = _totals(query, past_keys).copy_(past)
    strength = strength.contiguous()  # here, since finish_row reads it before it waits for the first launch
    entries = strength if mask is None else mask.view(torch.int8)
    if entries.stride(-1) != 1:
        entries = entries.contiguous()
    layout = StepLayout(
        query.shape, key.shape, query.stride(), key.stride(), value.stride(),
        (query.dtype, key.dtype, value.dtype, strength.dtype), query.device,
        past_keys, past.stride(1), mask is not None, 0 if mask is None or mask.shape[0] == 1 else entries.stride(0),
        scale, sign,
    )  # fmt: skip
    plan = cached(_plans, layout, _make_plan, layout)
    out = query.new_empty(query.shape)
    scratch = query.new_empty(plan.scratch_bytes, dtype=torch.uint8)
    plan.launches(query, key, value, entries, past, strength, totals, out, scratch)
    return out, totals


def _make_plan(step: StepLayout) -> StepPlan:
    """The launches of a step. Layers of a model share a plan until the cache has another number of keys. Plans that differ
    only in sizes, which are not compiled in, share their binaries."""
    batch, heads, _, dim = step.query_shape
    key_heads, keys = step.key_shape[1:3]
    group = heads // key_heads
    dtype = step.dtypes[0]
    hopper = has_hopper_step(dtype, dim, group, step.device)
    is_full = dtype == torch.float32
    block = HOPPER_STEP if hopper else FULL if is_full else HALF
    tiles = ceil_div(keys, block.keys)
    lines, rows = batch * key_heads, batch * heads
    places = block.programs * multiprocessors(step.device)
    wanted = places // lines if hopper else ceil_div(places, lines)
    part_tiles = ceil_div(tiles, max(1, min(tiles, wanted)))
    parts = ceil_div(tiles, part_tiles)
    blocks = ceil_div(keys, block.finish_keys)
    width = max(16, next_power_of_2(dim))
    fixed = {"DIM": dim, "BLOCK_DIM": width, "KEYS": block.keys}
    attend_fixed = {
        **fixed, "GROUP": group, "ROWS": max(16, next_power_of_2(group)), "MASKED": step.masked,
        "PRECISION": "ieee" if is_full else "tf32",
        "num_warps": block.warps, "num_stages": block.stages, "STAGES": block.stages,
    }  # fmt: skip
    finish_fixed = {
        **fixed, "SIZE": block.finish_keys, "PARTS": next_power_of_2(parts), "PDL": hopper, "num_warps": 4,
        **({"launch_pdl": True} if hopper else {}),
    }  # fmt: skip
    sizes = {
        **_eighths("q", step.query_strides), **_eighths("k", step.key_strides), **_eighths("v", step.value_strides),
        "mask_batch": step.mask_batch, "heads": heads, "keys": keys, "past_keys": step.past_keys,
        "past_line": step.past_line // 16, "new_line": _totals_line(keys) // 16,
        "tiles": tiles, "parts": parts, "part_tiles": part_tiles, "blocks": blocks,
    }  # fmt: skip
    numbers = {**sizes, "score_scale": step.scale * math.log2(math.e), "sign": step.sign}
    slices, scratch_bytes = lay_out_buffer(
        "scratch",
        {
            "part_out": ((rows * parts, width), torch.float32),
            "part_sums": ((rows * parts, 4), torch.float32),
            "tile_tops": ((rows, tiles), torch.float32),
            "numerators": ((rows, tiles * block.keys), torch.float32 if is_full else torch.float16),
        },
        alignment=CACHE_LINE,
    )
    wide = tuple(size >= 2**31 for size in sizes.values())  # sizes that Triton passes in 64 bits
    compiled_for = (
        step.device, step.dtypes, wide, hopper, *attend_fixed.values(), *finish_fixed.values()
    )  # fmt: skip
    launches = LaunchSequence(step.device, TENSORS, slices, cached(_binaries, compiled_for, dict))
    launches.add(hopper_kernel() if hopper else attend_part, lines * parts, numbers | attend_fixed)
    launches.add(finish_row, rows * (blocks + 1), numbers | finish_fixed)
    return StepPlan(launches, scratch_bytes)


def _aligned(states: Tensor) -> Tensor:
    """The states, copied unless all strides but the last, which is 1, are multiples of 8, and the address of 16 bytes, as
    asynchronous copies need."""
    batch, head, row, last = states.stride()
    if last == 1 and batch % 8 == head % 8 == row % 8 == states.data_ptr() % 16 == 0:
        return states
    return states.clone(memory_format=torch.contiguous_format)


def _is_readable(past: Tensor) -> bool:
    """Whether rows of sums are float32, a multiple of 16 apart, in order, and can be read up to a vector's end, the last one
    too."""
    batch, heads, keys = past.shape
    line = past.stride(1)
    if past.dtype != torch.float32 or past.stride(2) != 1 or line % 16 or past.stride(0) != heads * line:
        return False
    end = past.storage_offset() + (batch * heads - 1) * line + ceil_div(keys, VECTOR.value) * VECTOR.value
    return end * past.itemsize <= past.untyped_storage().nbytes()


def _eighths(name: str, strides: tuple[int, ...]) -> dict[str, int]:
    """Strides of batch, head and row divided by 8, as ``attend_part`` takes them."""
    axes = zip(("batch", "head", "row"), strides, strict=False)
    return {f"{name}_{axis}": stride // 8 for axis, stride in axes}


STEP = operator(
    "decoding_step",
    "(Tensor query, Tensor key, Tensor value, Tensor strength, Tensor? past, Tensor? mask, float scale, float sign)"
    " -> (Tensor, Tensor)",
    _step,
    _shapes,
)

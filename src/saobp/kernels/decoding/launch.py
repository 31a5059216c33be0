"""Launches of a decoding step, as an operator that returns the output and the new sums of messages."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saobp.kernels import dispatch
from saobp.kernels.call_spec import ceil_div, next_power_of_2
from saobp.kernels.decoding.step import VECTOR, attend_part, finish_row
from saobp.kernels.runtime.custom_op import operator
from saobp.kernels.runtime.launcher import KernelLaunch, cached, compute_capability, multiprocessors

LINE = 64
"""Rows of sums of messages are this many numbers, or a multiple, apart: kernels rely on 16."""


class StepBlock(NamedTuple):
    """Keys of a tile, warps and stages of ``attend_part``, its programs per multiprocessor, keys of a program of
    ``finish_row``."""

    keys: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 2
    finished: int = 2048


HALF, FULL = StepBlock(), StepBlock(32, 4, 1)
"""For half types, the fastest found on an H200, and for float32."""
HOPPER_STEP = StepBlock(32, 1, 2, 6, 1024)
"""For half types on Hopper: 34 KiB of shared memory a program, with heads of 128."""


def hopper_kernel() -> Any:
    """Imported on first use: other versions of Triton may lack the Gluon API it needs."""
    from saobp.kernels.decoding.hopper_step import attend_part_hopper

    return attend_part_hopper


def has_hopper_step(query: Tensor, group: int) -> bool:
    """Whether ``attend_part_hopper`` can do a step, with ``group`` query heads for each key head."""
    fits = query.dtype != torch.float32 and query.shape[3] in (64, 128) and group <= 8
    return fits and dispatch.has_hopper_kernel(compute_capability(query.device))


def decoding_step(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, past: Tensor | None, mask: Tensor | None,
    scale: float, sign: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output ``[batch, heads, 1, dim]`` and sums of log messages ``[batch, heads, keys]`` after the row.

    query ``[batch, heads, 1, dim]``, key and value ``[batch, key_heads, keys, dim]``, strength ``[heads]``
    past: the sums before the row, ``[batch, heads, up to keys]``; 0 for keys beyond
    mask: int8 or bool ``[batch or 1, keys]``: 0 hidden, 1 seen, 2 seen by a padding row, which sends no message
    """
    step: tuple[Tensor, Tensor] = STEP(query, key, value, strength, past, mask, scale, sign)
    return step


def _totals(query: Tensor, keys: int) -> Tensor:
    """An empty tensor for sums of messages ``[batch, heads, keys]`` with aligned rows, which kernels fill up to a vector's end."""
    batch, heads = query.shape[:2]
    line = ceil_div(keys, LINE) * LINE
    return query.new_empty((batch, heads, line), dtype=torch.float32)[..., :keys]


def _shapes(
    query: Tensor, key: Tensor, _value: Tensor, _strength: Tensor, _past: Tensor | None, _mask: Tensor | None,
    _scale: float, _sign: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return query.new_empty(query.shape), _totals(query, key.shape[2])


def _step(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, past: Tensor | None, mask: Tensor | None,
    scale: float, sign: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, _, dim = query.shape
    key_heads, keys = key.shape[1:3]
    group = heads // key_heads
    hopper = has_hopper_step(query, group)
    block = HOPPER_STEP if hopper else FULL if query.dtype == torch.float32 else HALF
    query, key, value = _aligned(query), _aligned(key), _aligned(value)
    past_keys = 0 if past is None else past.shape[-1]
    totals = _totals(query, keys)
    if past is None:
        past = totals
    elif not _is_readable(past):
        past = _totals(query, past_keys).copy_(past)
    tiles = ceil_div(keys, block.keys)
    lines = batch * key_heads
    places = block.programs * multiprocessors(query.device)
    wanted = places // lines if hopper else ceil_div(places, lines)
    part_tiles = ceil_div(tiles, max(1, min(tiles, wanted)))
    parts = ceil_div(tiles, part_tiles)
    width = max(16, next_power_of_2(dim))
    rows = batch * heads
    numerators_dtype = torch.float32 if query.dtype == torch.float32 else torch.float16
    numerators = query.new_empty(rows * tiles * block.keys, dtype=numerators_dtype)
    sizes_of_sums = [rows * parts * width, rows * parts * 4, rows * tiles]
    sums = query.new_empty(sum(sizes_of_sums), dtype=torch.float32)
    part_out, part_sums, tile_tops = sums.split(sizes_of_sums)
    out = query.new_empty(query.shape)
    blocks = ceil_div(keys, block.finished)
    fixed = {"DIM": dim, "BLOCK_DIM": width, "KEYS": block.keys}
    attend_fixed = {
        **fixed, "GROUP": group, "ROWS": max(16, next_power_of_2(group)), "MASKED": mask is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": block.warps, "num_stages": block.stages, "STAGES": block.stages,
    }  # fmt: skip
    finish_fixed = {
        **fixed, "SIZE": block.finished, "PARTS": next_power_of_2(parts), "PDL": hopper, "num_warps": 4,
        **({"launch_pdl": True} if hopper else {}),
    }  # fmt: skip
    entries = strength if mask is None else mask.view(torch.int8)
    if entries.stride(-1) != 1:
        entries = entries.contiguous()
    sizes = {
        **_eighths("q", query), **_eighths("k", key), **_eighths("v", value),
        "mask_batch": 0 if mask is None or mask.shape[0] == 1 else entries.stride(0),
        "heads": heads, "keys": keys, "past_keys": past_keys, "past_line": past.stride(1) // 16, "new_line": totals.stride(1) // 16,
        "tiles": tiles, "parts": parts, "part_tiles": part_tiles, "blocks": blocks,
        "score_scale": scale * math.log2(math.e), "sign": sign,
    }  # fmt: skip
    strength = strength.contiguous()  # here, since finish_row reads it before it waits for the first launch
    dtypes = (query.dtype, strength.dtype)
    _launch(
        hopper_kernel() if hopper else attend_part, lines * parts, sizes, attend_fixed, dtypes, query.device
    )(query, key, value, entries, past, part_out, part_sums, tile_tops, numerators)
    _launch(finish_row, rows * (blocks + 1), sizes, finish_fixed, dtypes, query.device)(
        past, strength, part_out, part_sums, tile_tops, numerators, totals, out
    )
    return out, totals


def _aligned(states: Tensor) -> Tensor:
    """The states, copied unless all strides but the last, which is 1, are multiples of 8, and the address of 16 bytes, as
    asynchronous copies need."""
    batch, head, row, last = states.stride()
    if last == 1 and batch % 8 == head % 8 == row % 8 == states.data_ptr() % 16 == 0:
        return states
    return states.clone(memory_format=torch.contiguous_format)


def _is_readable(past: Tensor) -> bool:
    """Whether rows of sums are a multiple of 16 apart, in order, and can be read up to a vector's end, the last one too."""
    batch, heads, keys = past.shape
    line = past.stride(1)
    if past.stride(2) != 1 or line % 16 or past.stride(0) != heads * line:
        return False
    end = past.storage_offset() + (batch * heads - 1) * line + ceil_div(keys, VECTOR.value) * VECTOR.value
    return end * past.itemsize <= past.untyped_storage().nbytes()


def _eighths(name: str, states: Tensor) -> dict[str, int]:
    """Strides of batch, head and row divided by 8, as ``attend_part`` takes them."""
    strides = zip(("batch", "head", "row"), states.stride(), strict=False)
    return {f"{name}_{axis}": stride // 8 for axis, stride in strides}


_launches: dict[Any, KernelLaunch] = {}


def _launch(
    kernel: Any, programs: int, sizes: dict[str, Any], fixed: dict[str, Any], dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> KernelLaunch:  # fmt: skip
    """The launch of a kernel compiled for ``fixed``; sizes, which grow with the cache, are not compiled in."""
    key = (kernel.__name__, device, *dtypes, *fixed.values())
    made = cached(_launches, key, KernelLaunch, kernel, programs, sizes | fixed, device)
    launch = copy.copy(made)
    launch.programs = programs
    launch.numbers = tuple((sizes | fixed)[name] for name in launch.names)
    return launch


STEP = operator(
    "decoding_step",
    "(Tensor query, Tensor key, Tensor value, Tensor strength, Tensor? past, Tensor? mask, float scale, float sign)"
    " -> (Tensor, Tensor)",
    _step,
    _shapes,
)

"""Launch of the sweep over keys, and the sum of its blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from saobp.kernels.runtime.launcher import INTERPRETED, KernelLaunch, cached
from saobp.kernels.statistics.row_sweep import row_sweep
from saobp.propagation.row_statistics import RowMask, RowSums

MOST_WIDTH = 256
NUMBERS = 6
"""Numbers of a block of rows, as the kernel writes them."""

_launches: dict[Any, tuple[KernelLaunch, int]] = {}


def can_sweep(query: Tensor, key: Tensor, scale: float) -> bool:
    """Whether the kernel takes these states: on a GPU, not in double precision, up to 256 wide."""
    kinds = (torch.float16, torch.float32) if INTERPRETED else (torch.float16, torch.bfloat16, torch.float32)
    return (
        (query.is_cuda or INTERPRETED)
        and query.dtype == key.dtype
        and query.dtype in kinds
        and query.shape[-1] <= MOST_WIDTH
        and query.stride(-1) == 1
        and key.stride(-1) == 1
        and scale > 0
    )


def tile_sizes(width: int, itemsize: int) -> dict[str, int]:
    """Rows and keys of a tile, warps and stages, by the head's padded width."""
    if INTERPRETED:
        return {"ROWS": 16, "KEYS": 16}
    if itemsize == 4:
        return {"ROWS": 64, "KEYS": 32, "num_warps": 4, "num_stages": 2}
    if width > 128:
        return {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}
    return {"ROWS": 64 if width <= 64 else 128, "KEYS": 64, "num_warps": 4, "num_stages": 3}


def sweep_rows(
    query: Tensor, key: Tensor, value: Tensor | None, mask: RowMask, *, scale: float, first: int
) -> RowSums:
    """``propagation.row_statistics.row_sums`` by the kernel; states as there."""
    batch, heads, queries, dim = query.shape
    key_heads, keys = key.shape[1:3]
    norms = query
    norm_strides: tuple[int, ...] = (0, 0, 0)
    if value is not None:
        norms = torch.linalg.vector_norm(value, dim=-1, dtype=torch.float32)
        norm_strides = norms.stride()
    real_keys, real_rows = _bytes(mask.real_keys, query), _bytes(mask.real_rows, query)
    entries = _bytes(mask.entries, query)
    starts = query if mask.starts is None else mask.starts
    ends = query if mask.ends is None else mask.ends
    width = max(16, triton.next_power_of_2(dim))
    numbers = {
        "query_batch": query.stride(0), "query_head": query.stride(1), "query_row": query.stride(2),
        "key_batch": key.stride(0), "key_head": key.stride(1), "key_row": key.stride(2),
        "norm_batch": norm_strides[0], "norm_head": norm_strides[1], "norm_row": norm_strides[2],
        "real_keys_batch": 0 if mask.real_keys is None else real_keys.stride(0),
        "real_rows_batch": 0 if mask.real_rows is None else real_rows.stride(0),
        **_mask_strides(mask.entries, entries),
        "starts_batch": 0 if mask.starts is None else starts.stride(0),
        "heads": heads, "group": heads // key_heads, "queries": queries, "keys": keys,
        "offset": keys - queries, "window": mask.window or 0,
        "score_scale": scale / math.log(2), "lowest_bias": mask.lowest_bias,
        "DIM": dim, "WIDTH": width, "FIRST": first, "CAUSAL": mask.causal, "WINDOW": mask.window is not None,
        "PADDED": mask.real_keys is not None, "MASK": mask.kind,
        "STARTS": 0 if mask.starts is None else 1 if mask.ends is None else 2, "WEIGHTED": value is not None,
    }  # fmt: skip
    tensors = (query, key, norms, real_keys, real_rows, entries, starts, ends)
    described = tuple(numbers.values()), tuple(one.dtype for one in tensors), batch, query.device
    launch, blocks = cached(_launches, described, _make, numbers, width, query, batch * heads)
    out = torch.empty(batch, heads, blocks, NUMBERS, dtype=torch.float32, device=query.device)
    launch(*tensors, out)
    return RowSums(out[..., 0], out[..., 1:])


def _make(numbers: dict[str, Any], width: int, query: Tensor, lines: int) -> tuple[KernelLaunch, int]:
    sizes = tile_sizes(width, query.element_size())
    blocks = -(-numbers["queries"] // sizes["ROWS"])
    return KernelLaunch(row_sweep, blocks * lines, {**numbers, **sizes}, query.device), blocks


def _bytes(mask: Tensor | None, unused: Tensor) -> Tensor:
    """A bool mask as bytes, without a copy; any other unchanged."""
    if mask is None:
        return unused
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _mask_strides(mask: Tensor | None, entries: Tensor) -> dict[str, int]:
    if mask is None:
        return {"mask_batch": 0, "mask_head": 0, "mask_row": 0}
    batch, head, row = (entries.stride(axis) if entries.shape[axis] > 1 else 0 for axis in range(3))
    return {"mask_batch": batch, "mask_head": head, "mask_row": row}

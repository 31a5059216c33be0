"""Launch of the sweep over keys, and the sum of its blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from saobp.kernels.dispatch import HOPPER
from saobp.kernels.runtime.launcher import (
    INTERPRETED,
    KernelLaunch,
    TileDescriptor,
    cached,
    compute_capability,
    is_aligned,
)
from saobp.kernels.statistics.row_sweep import row_sweep
from saobp.propagation.row_statistics import RowMask, RowSums

MOST_WIDTH = 256
NUMBERS = 6
"""Numbers that the kernel writes for each block of rows."""

SECTION_BYTES = 24 * 2**20
"""Bytes of keys of the heads that run at a time: about half of an H200's L2 cache."""

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


def tile_sizes(width: int, itemsize: int, wide: bool) -> dict[str, int]:
    """Rows and keys of a tile, warps, stages and registers, by the head's padded width.

    ``wide``: few tiles have hidden entries, which in tiles of 128 keys would not fit the registers.
    """
    if INTERPRETED:
        return {"ROWS": 16, "KEYS": 16}
    if itemsize == 4:
        return {"ROWS": 64, "KEYS": 32, "num_warps": 4, "num_stages": 2}
    if width > 128:
        return {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}
    if width == 64 and wide:
        return {"ROWS": 64, "KEYS": 128, "num_warps": 4, "num_stages": 2, "maxnreg": 128}
    return {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}


def sweep_rows(
    query: Tensor, key: Tensor, value: Tensor | None, mask: RowMask, *, scale: float, first: int
) -> RowSums:
    """``propagation.row_statistics.row_sums`` by the kernel; states as there."""
    norms = None if value is None else torch.linalg.vector_norm(value, dim=-1, dtype=torch.float32)
    masks = _bytes(mask.real_keys), _bytes(mask.real_rows), _bytes(mask.entries), mask.starts, mask.ends
    given = query, key, norms, *masks
    forms = tuple(None if one is None else (one.dtype, one.shape, one.stride()) for one in given)
    described = forms, scale, first, mask.causal, mask.window, is_aligned(key), query.device
    launch, blocks = cached(_launches, described, _make, given, mask, scale, first)
    out = torch.empty(*query.shape[:2], blocks, NUMBERS, dtype=torch.float32, device=query.device)
    launch(*(query if one is None else one for one in given), out)
    return RowSums(out[..., 0], out[..., 1:])


def _make(
    given: tuple[Tensor | None, ...], mask: RowMask, scale: float, first: int
) -> tuple[KernelLaunch, int]:
    """The launch for tensors of these forms, in the kernel's order, and its blocks of rows."""
    query, key, norms, real_keys, real_rows, entries, starts, ends = given
    assert query is not None
    assert key is not None
    batch, heads, queries, dim = query.shape
    key_heads, keys = key.shape[1:3]
    width = max(16, triton.next_power_of_2(dim))
    norm_strides = (0, 0, 0) if norms is None else norms.stride()
    group = heads // key_heads
    section = group * max(1, SECTION_BYTES // (keys * dim * key.element_size()))
    mapped = (
        query.element_size() == 2
        and dim in (64, 128)
        and is_aligned(key)
        and compute_capability(query.device) >= HOPPER
    )
    wide = mapped and all(one is None for one in (real_keys, entries, starts))
    sizes = tile_sizes(width, query.element_size(), wide)
    numbers = {
        "query_batch": query.stride(0), "query_head": query.stride(1), "query_row": query.stride(2),
        "key_batch": key.stride(0), "key_head": key.stride(1), "key_row": key.stride(2),
        "norm_batch": norm_strides[0], "norm_head": norm_strides[1], "norm_row": norm_strides[2],
        "real_keys_batch": 0 if real_keys is None else real_keys.stride(0),
        "real_rows_batch": 0 if real_rows is None else real_rows.stride(0),
        **_mask_strides(entries),
        "starts_batch": 0 if starts is None else starts.stride(0),
        "heads": heads, "group": group, "section": section, "queries": queries, "keys": keys,
        "offset": keys - queries, "window": mask.window or 0,
        "score_scale": scale / math.log(2), "lowest_bias": mask.lowest_bias,
        "DIM": dim, "WIDTH": width, "FIRST": first, "CAUSAL": mask.causal, "WINDOW": mask.window is not None,
        "PADDED": real_keys is not None, "MASK": mask.kind, "STARTS": 0 if starts is None else 1 if ends is None else 2,
        "WEIGHTED": norms is not None, "MAPPED": mapped, **sizes,
    }  # fmt: skip
    tile = TileDescriptor(tuple(key.shape), key.stride(), (1, 1, sizes["KEYS"], dim))
    blocks = -(-queries // sizes["ROWS"])
    launch = KernelLaunch(
        row_sweep, blocks * batch * heads, numbers, query.device, {"key": tile} if mapped else None
    )
    return launch, blocks


def _bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask as bytes, without a copy; any other unchanged."""
    if mask is None:
        return None
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _mask_strides(entries: Tensor | None) -> dict[str, int]:
    if entries is None:
        return {"mask_batch": 0, "mask_head": 0, "mask_row": 0}
    batch, head, row = (entries.stride(axis) if entries.shape[axis] > 1 else 0 for axis in range(3))
    return {"mask_batch": batch, "mask_head": head, "mask_row": row}

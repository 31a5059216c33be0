"""The sweep for statistics of rows against its specification, and that against dense maps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from saobp.kernels.statistics import launch
from saobp.kernels.statistics.launch import can_sweep, sweep_rows
from saobp.propagation import row_statistics
from saobp.propagation.row_statistics import RowMask, row_sums

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KINDS = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
BATCH, HEADS, KEY_HEADS, LENGTH, DIM, FIRST = 2, 2, 1, 35, 24, 3


def states(
    queries: int = LENGTH,
    keys: int = LENGTH,
    dim: int = DIM,
    kind: torch.dtype = torch.float32,
    size: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = (BATCH, queries, HEADS, dim), (BATCH, keys, KEY_HEADS, dim), (BATCH, keys, KEY_HEADS, dim)
    query, key, value = (torch.randn(shape, generator=generator).to(kind) for shape in shapes)
    return (size * query).transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def lengths(*real: int, keys: int = LENGTH, left: bool = False) -> Tensor:
    positions = torch.arange(keys)
    real_keys = torch.tensor(real)[:, None]
    return positions >= keys - real_keys if left else positions < real_keys


def packed(*edges: int) -> dict[str, Tensor]:
    starts = torch.tensor([start for start, stop in pairwise(edges) for _ in range(start, stop)])
    ends = torch.tensor([stop for start, stop in pairwise(edges) for _ in range(start, stop)])
    return {"starts": starts.int().expand(BATCH, -1), "ends": ends.int().expand(BATCH, -1)}


def padded(*real: int, left: bool = False, queries: int = LENGTH) -> dict[str, Tensor]:
    keys = lengths(*real, left=left)
    return {
        "real_keys": keys,
        "real_rows": keys[:, LENGTH - queries :],
        "starts": keys.int().argmax(-1).int(),
    }


def bias() -> Tensor:
    drawn = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5))
    return drawn.masked_fill(torch.rand(drawn.shape, generator=torch.Generator().manual_seed(6)) < 0.3, -3e38)


MASKS = {
    "full": RowMask(),
    "causal": RowMask(causal=True),
    "window": RowMask(causal=True, window=9),
    "wide window": RowMask(causal=True, window=25),
    "two-sided window": RowMask(window=20),
    "padded right": RowMask(**padded(35, 21)),
    "padded left, causal": RowMask(causal=True, **padded(35, 17, left=True)),
    "padded to nothing": RowMask(causal=True, **padded(35, 0)),
    "packed": RowMask(**packed(0, 6, 7, 24, 35)),
    "packed, causal": RowMask(causal=True, **packed(0, 17, 32, 35)),
    "entries": RowMask(
        entries=torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.4
    ),
    "entries for all rows": RowMask(entries=lengths(30, 10)[:, None, None]),
    "bias": RowMask(entries=bias()),
}

HALF = ("causal", "two-sided window", "bias")
"""Masks that half precision is tried with in the interpreter."""


def dense(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, scale: float) -> tuple[Tensor, Tensor]:
    """Maps as wholes in double precision: means of rows, ``[batch, heads, 4]``, and the largest score."""
    group = HEADS // KEY_HEADS
    key, value = (one.double().repeat_interleave(group, 1) for one in (key, value))
    scores = query.double() @ key.mT * scale
    queries, keys = scores.shape[-2:]
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    seen = torch.ones(BATCH, HEADS, queries, keys, dtype=torch.bool)
    if mask.causal:
        seen &= distance >= 0
    if mask.window:
        seen &= distance.abs() < mask.window
    if mask.real_keys is not None:
        seen &= mask.real_keys[:, None, None]
    first = torch.zeros(BATCH, queries, dtype=torch.long)
    if mask.starts is not None:
        first = (
            mask.starts.long() if mask.ends is not None else mask.starts.long()[:, None].expand(-1, queries)
        )
    if mask.ends is not None:
        seen &= (torch.arange(keys) >= first[..., None])[:, None]
        seen &= (torch.arange(keys) < mask.ends[..., None])[:, None]
    if mask.entries is not None:
        seen &= mask.entries > mask.lowest_bias if mask.kind == 2 else mask.entries
        scores = scores + mask.entries if mask.kind == 2 else scores
    scores = scores.masked_fill(~seen, -math.inf)
    maps = scores.softmax(-1).nan_to_num()
    counted = seen.any(-1)
    if mask.real_rows is not None:
        counted &= mask.real_rows[:, None]
    norms = value.norm(dim=-1)
    nth = torch.arange(keys) - first[..., None]
    ones, several = (nth == 0)[:, None], ((nth >= 0) & (nth < FIRST))[:, None]
    moved = maps * norms[:, :, None]
    rows = torch.stack(
        [
            torch.special.entr(maps).sum(-1),
            (maps * ones).sum(-1),
            (maps * several).sum(-1),
            (moved * ones).sum(-1) / moved.sum(-1).clamp(min=1e-300),
        ],
        -1,
    )
    means = (rows * counted[..., None]).sum(-2) / counted.sum(-1, keepdim=True).clamp(min=1)
    return means, scores.masked_fill(~counted[..., None], -math.inf).amax((-1, -2))


def on_device(mask: RowMask) -> RowMask:
    moved = {name: one.to(DEVICE) if isinstance(one, Tensor) else one for name, one in vars(mask).items()}
    return RowMask(**moved)


@pytest.mark.parametrize("name", MASKS)
def test_specification_equals_dense_maps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_statistics, "TILE_BYTES", 2**18)
    own = states(kind=torch.float64)
    means, top = dense(*own, MASKS[name], 0.3)
    found = row_sums(*own, MASKS[name], scale=0.3, first=FIRST).whole()
    torch.testing.assert_close(found.top, top)
    torch.testing.assert_close(found.sums[..., :4] / found.sums[..., 4:].clamp(min=1), means)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for kind in KINDS for name in MASKS if GPU or kind == torch.float32 or name in HALF],
)
def test_kernel_equals_the_specification(name: str, kind: torch.dtype) -> None:
    own, mask = states(kind=kind), on_device(MASKS[name])
    moved = [one.to(DEVICE) for one in own]
    assert can_sweep(*moved[:2], 0.3)
    found = sweep_rows(*moved, mask, scale=0.3, first=FIRST)
    _assert_same(found, row_sums(*moved, mask, scale=0.3, first=FIRST))


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("window", [None, 7])
def test_calls_with_a_cache_are_swept(queries: int, window: int | None) -> None:
    own, mask = [one.to(DEVICE) for one in states(queries)], RowMask(causal=True, window=window)
    means, top = dense(*(one.cpu() for one in own), mask, 0.3)
    found = sweep_rows(*own, mask, scale=0.3, first=FIRST).whole()
    torch.testing.assert_close(found.top.cpu().double(), top, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((found.sums[..., :4] / queries).cpu().double(), means, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dim", "length"), [(64, 33), (80, 16), (128, 40), (16, 1)] + ([(64, 1023), (128, 777)] if GPU else [])
)
def test_other_widths_and_lengths(dim: int, length: int) -> None:
    own, mask = [one.to(DEVICE) for one in states(length, length, dim)], RowMask(causal=True)
    _assert_same(sweep_rows(*own, mask, scale=0.2, first=2), row_sums(*own, mask, scale=0.2, first=2))


@pytest.mark.parametrize("name", ["causal", "window", "padded right", "bias"])
def test_keys_fetched_by_tma(name: str) -> None:
    own, mask = [one.to(DEVICE) for one in states(dim=64, kind=torch.float16)], on_device(MASKS[name])
    _assert_same(sweep_rows(*own, mask, scale=0.2, first=FIRST), row_sums(*own, mask, scale=0.2, first=FIRST))


def test_heads_in_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two texts with two heads over one, each text is a section."""
    monkeypatch.setattr(launch, "SECTION_BYTES", 0)
    monkeypatch.setattr(launch, "_launches", {})
    own, mask = [one.to(DEVICE) for one in states()], RowMask(causal=True)
    found, expected = (way(*own, mask, scale=0.3, first=FIRST) for way in (sweep_rows, row_sums))
    _assert_same(found, expected)


def test_sharp_rows_lose_no_digits() -> None:
    """Logits of several hundred: entropy is a small difference of large numbers, unless computed well."""
    own = [one.to(DEVICE) for one in states(size=60.0)]
    found = sweep_rows(*own, RowMask(causal=True), scale=1.0, first=FIRST).whole()
    means, top = dense(*(one.cpu() for one in own), RowMask(causal=True), 1.0)
    assert float(top.max()) > 300
    torch.testing.assert_close(found.top.cpu().double(), top, rtol=1e-5, atol=0)
    torch.testing.assert_close((found.sums[..., :4] / LENGTH).cpu().double(), means, rtol=2e-3, atol=1e-4)


def test_without_values_and_with_broken_states() -> None:
    query, key, _ = (one.to(DEVICE) for one in states())
    found = sweep_rows(query, key, None, RowMask(), scale=0.3, first=1).whole()
    assert float(found.sums[..., 3].abs().max()) == 0
    torch.testing.assert_close(found.sums[..., 1], found.sums[..., 2])
    broken = query.clone()
    broken[0, 1, 3] = float("nan")
    found = sweep_rows(broken, key, None, RowMask(), scale=0.3, first=1).whole()
    assert found.sums[0, 1, 0].isnan()
    assert found.sums[0, 0].isfinite().all()


def _assert_same(found: row_statistics.RowSums, expected: row_statistics.RowSums) -> None:
    found, expected = found.whole(), expected.whole()
    torch.testing.assert_close(found.top, expected.top, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.sums[..., 4], expected.sums[..., 4])
    torch.testing.assert_close(found.sums, expected.sums, rtol=2e-4, atol=2e-3)

"""Tiles that TMA fetches are those that threads would load: the same results bit by bit."""

from __future__ import annotations

import pytest
import torch
from call_helpers import clear_plans, spec_of
from torch import Tensor

import saobp
from saobp.kernels import dispatch
from saobp.kernels.causal import launch as causal_launch
from saobp.kernels.runtime.launcher import TileDescriptor, kernels_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]


def states(
    heads: int, length: int, dtype: torch.dtype = torch.float16, dim: int = 64, batch: int = 2
) -> Tensor:
    """``[batch, heads, length, dim]`` as models lay it out."""
    return torch.randn(batch, length, heads, dim, device=DEVICE).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("how", ["plain", "padding", "dropout", "listing", "grouped"])
def test_results_do_not_depend_on_who_fetches(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, length: int, how: str
) -> None:
    heads, batch = (2, 1) if how == "grouped" else (1, 2)
    query, key, value = (states(count, length, dtype, batch=batch) for count in (heads, 1, 1))
    options: dict[str, object] = {}
    if how == "padding":
        options["padding_mask"] = torch.arange(length, device=DEVICE) < torch.tensor(
            [[length], [130]], device=DEVICE
        )
    if how == "dropout":
        options["dropout_p"] = 0.1
    refinement = saobp.Refinement("high-listing" if how == "listing" else "high", 0.2)
    found = []
    for least in (1 << 60, 0):
        monkeypatch.setattr(dispatch, "TMA_MIN_ENTRIES", least)
        clear_plans()
        torch.manual_seed(3)
        found.append(saobp.attention(query, key, value, refinement, backend="fused", **options))
    assert torch.equal(*found)


@pytest.mark.usefixtures("weak_way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["plain", "padding", "dropout", "grouped", "spans"])
def test_strict_causal_results_do_not_depend_on_who_fetches(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, how: str
) -> None:
    """Output and gradients, with all sweeps of weak strengths that have maps taking them, and none."""
    sweeps = (
        "row_sums",
        "weak_messages",
        "weak_output",
        "weak_climb",
        "weak_query_gradient",
        "weak_prior_gradient",
    )
    blocks = {name: causal_launch.FETCHED.get(name, causal_launch.TILES[name]) for name in sweeps}
    monkeypatch.setattr(causal_launch, "FETCHED", blocks)
    monkeypatch.setattr(causal_launch, "SPAN", 128 if how == "spans" else 8192)
    monkeypatch.setattr(dispatch, "STORED_MAX_LENGTH", 0)  # short rows have another backward pass
    made: list[tuple[int, ...]] = []
    describe = TileDescriptor.of
    monkeypatch.setattr(
        TileDescriptor, "of", lambda tiles, tensor: made.append(tiles.tile) or describe(tiles, tensor)
    )
    length = 260 if how == "spans" else 150
    heads, batch = (2, 1) if how == "grouped" else (1, 2)
    leaves = [states(count, length, dtype, batch=batch).requires_grad_() for count in (heads, 1, 1)]
    options: dict[str, object] = {}
    if how == "padding":
        options["padding_mask"] = torch.arange(length, device=DEVICE) < torch.tensor(
            [[length], [70]], device=DEVICE
        )
    if how == "dropout":
        options["dropout_p"] = 0.1
    gradient = states(heads, length, dtype, batch=batch)
    found = []
    for least in (1 << 60, 0):
        monkeypatch.setattr(dispatch, "TMA_MIN_ENTRIES", least)
        clear_plans()
        assert not made
        torch.manual_seed(3)
        out = saobp.attention(
            *leaves, saobp.Refinement("high", 0.2), is_causal=True, backend="fused", **options
        )
        found.append([out, *torch.autograd.grad(out, leaves, gradient)])
    spans = 3 if how == "spans" else 1
    assert made == [(1, 1, 64, 64)] * (2 + 7 * spans)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_what_tma_cannot_fetch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "TMA_MIN_ENTRIES", 0)

    def fits(one: Tensor) -> bool:
        spec = spec_of(one, one, None, None, one.shape[2], 1.0, 0.0, 1.0, 1, 0.18)
        return kernels_for("long", spec, one).tma

    good = states(2, 256)
    assert fits(good)
    assert not fits(good.float())
    assert not fits(states(2, 256, dim=32))
    assert not fits(torch.randn(2, 2, 256, 68).half()[..., 4:]), "rows do not begin at multiples of 16 bytes"
    assert not fits(torch.randn(2, 2, 256, 72).half()[..., 4:68]), "nor does the first one"
    assert not fits(states(1, 256).expand(2, 2, 256, 64)), "a head that stands for two"
    monkeypatch.undo()
    assert not fits(good), "too little work"

"""Products with refined maps by the fused kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from saobp import Refinement
from saobp.metrics.attention_inputs import AttentionInputs
from saobp.metrics.operators.fused import FusedOperator, can_fuse, operator_for
from saobp.metrics.operators.tiled import Mask

pytest.importorskip("triton")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("factor", "tokens"),
    [("high", 130), ("low", 20), ("high-listing", 37), ("high-key-bias", 130), ("low-key-bias", 20)],
)
def test_products_equal_those_of_the_map(factor: str, tokens: int) -> None:
    """Forward, transposed and single rows against the map; more channels than the head is wide."""
    generator = torch.Generator().manual_seed(tokens)
    query, key = (1.5 * torch.randn(2, 2, tokens, 16, generator=generator)).to(DEVICE)
    forward, backward = torch.randn(2, 2, tokens, 21, generator=generator).to(DEVICE)
    refinement, strength = Refinement(factor, 0.7), torch.tensor([0.7, 0.2], device=DEVICE)
    heads = AttentionInputs(query[None], key[None], strength, refinement, False, 0.3)
    maps = heads.maps().rows[0]
    operator = FusedOperator(query, key, refinement, strength, scale=0.3)
    out, gathered = operator.sweep(forward, backward)
    places = torch.tensor([0, tokens - 1], device=DEVICE)
    for found, expected in (
        (out, maps @ forward),
        (gathered, maps.transpose(-1, -2) @ backward),
        (operator.rows(places), maps[:, places]),
    ):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernels are chosen on a GPU")
def test_refined_heads_on_a_gpu_take_the_kernels() -> None:
    states, strength = torch.randn(1, 40, 16, device=DEVICE), torch.tensor([0.2], device=DEVICE)
    for refinement in (Refinement("high", 0.2), Refinement("high-key-bias", 0.2)):
        operator = operator_for(states, states, refinement, strength, Mask(), scale=0.3)
        assert isinstance(operator, FusedOperator)
    every_other = Refinement("high-key-bias", 0.2, message_stride=2)
    assert not can_fuse(states, states, every_other, Mask(), 0.3)


def test_what_the_kernels_cannot_do_goes_in_tiles() -> None:
    states = torch.randn(1, 8, 4)
    assert not can_fuse(states, states, Refinement("high", 0.2), Mask(causal=True), 0.5)
    assert not can_fuse(states, states, Refinement("high", 0.2), Mask(window=3), 0.5)

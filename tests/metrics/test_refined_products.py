"""Products with refined maps by the fused kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from saobp import Refinement
from saobp.metrics.fused import FusedOperator, can_fuse
from saobp.metrics.methods import Heads
from saobp.metrics.sampled import operator_for
from saobp.metrics.tiles import Mask

pytest.importorskip("triton")


def check(factor: str, tokens: int, device: str) -> None:
    """Forward, transposed and single rows against the map; more channels than the head is wide."""
    generator = torch.Generator().manual_seed(tokens)
    query, key = (1.5 * torch.randn(2, 2, tokens, 16, generator=generator)).to(device)
    forward, backward = torch.randn(2, 2, tokens, 21, generator=generator).to(device)
    refinement, strength = Refinement(factor, 0.7), torch.tensor([0.7, 0.2], device=device)
    heads = Heads(query[None], key[None], strength, refinement, False, 0.3)
    maps = heads.maps().rows[0]
    operator = operator_for(query, key, refinement, strength, heads.mask(), scale=0.3)
    assert isinstance(operator, FusedOperator)
    out, gathered = operator.sweep(forward, backward)
    places = torch.tensor([0, tokens - 1], device=device)
    for found, expected in (
        (out, maps @ forward),
        (gathered, maps.transpose(-1, -2) @ backward),
        (operator.rows(places), maps[:, places]),
    ):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [37, 300])
@pytest.mark.parametrize("factor", ["high", "low", "high-listing"])
def test_products_on_a_gpu(factor: str, tokens: int) -> None:
    check(factor, tokens, "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU itself is tested")
def test_products_in_the_interpreter() -> None:
    """In a process of its own, because Triton reads the setting as it is imported."""
    cases = [("high", 130), ("low", 20)]
    code = f"import test_fused; [test_fused.check(*case, 'cpu') for case in {cases}]"
    folder = str(Path(__file__).parent)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_the_kernels_cannot_do_goes_in_tiles() -> None:
    states = torch.randn(1, 8, 4)
    assert not can_fuse(states, states, Refinement("high", 0.2), Mask(causal=True), 0.5)
    assert not can_fuse(states, states, Refinement("high", 0.2), Mask(window=3), 0.5)

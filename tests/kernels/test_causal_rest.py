"""Strict causal gradients where D needs more digits than the rounded output has: those of ``rest``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_helpers import fused_operation, note_launches, spec_of
from torch import Tensor

from saobp import Refinement
from saobp.kernels.call_spec import CallSpec
from saobp.kernels.fused import FAMILIES
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import attention_inputs, collapsed_inputs

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16]
CLIMBS = {"stored": "stored_climb", "sweeps": "causal_value_gradient"}


@pytest.fixture(params=CLIMBS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which backward kernels calls of more than 128 tokens take."""
    if request.param == "sweeps":
        monkeypatch.setattr("saobp.kernels.dispatch.STORED_MAX_LENGTH", 0)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
@pytest.mark.parametrize("gap", [2.0, 3.0, 5.0])
@pytest.mark.parametrize("strength", [-0.5, -1.0])
def test_sinks_that_weak_attraction_fills(
    strength: float, gap: float, factor: Any, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refined rows are nearly one-hot on a key of little prior, along which D's error would be taken out."""
    launched = note_launches(monkeypatch)
    inputs = attention_inputs(1, 2, 140, 16, strength=strength, dtype=dtype, device=DEVICE)
    inputs, refinement = collapsed_inputs(inputs, gap), Refinement(factor, "learned")
    assert_within_budget(
        fused_operation(refinement, inputs, is_causal=True), inputs, refinement, is_causal=True
    )
    assert CLIMBS[way] in launched


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
@pytest.mark.parametrize(("gap", "strength"), [(5.0, 0.5), (5.0, 1.0), (10.0, 1.5)])
@pytest.mark.usefixtures("way")
def test_sinks_that_repulsion_shuns(gap: float, strength: float, factor: Any, dtype: torch.dtype) -> None:
    """Several heads, since the error of a row of dQ is a sum of few roundings."""
    inputs = attention_inputs(1, 8, 140, 16, strength=strength, dtype=dtype, device=DEVICE)
    inputs, refinement = collapsed_inputs(inputs, gap), Refinement(factor, "learned")
    assert_within_budget(
        fused_operation(refinement, inputs, is_causal=True), inputs, refinement, is_causal=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
@pytest.mark.parametrize("strength", [1.0, 3.0, 5.0])
def test_diagonals_of_strong_messages(strength: float, factor: Any, dtype: torch.dtype) -> None:
    """dQ is what is left of d K - t (a K): the rounded weights of a K have to sum up to 1."""
    inputs = attention_inputs(1, 1, 140, 16, strength=strength, dtype=dtype, device=DEVICE)
    inputs, refinement = collapsed_inputs(inputs, 10.0, "diagonal"), Refinement(factor, "learned")
    assert_within_budget(
        fused_operation(refinement, inputs, is_causal=True), inputs, refinement, is_causal=True
    )


def test_output_and_rest_scale_with_values() -> None:
    """Three times the values give three times the output only to the digits that ``rest`` adds."""
    inputs = attention_inputs(1, 2, 200, 16, strength=1.0, dtype=torch.float16, device=DEVICE)
    query, key, value, strength = (one.detach() for one in inputs.leaves())
    value = (8 * value).round() / 8  # so that three times as much is exact

    def results(value: Tensor) -> tuple[Tensor, Tensor]:
        numbers = (200, 0.25, 0.0, 1.0, 1, 0.0)
        out, _, rest = FAMILIES["causal"].forward(query, key, value, strength, None, None, None, *numbers)
        return out.float(), rest.float()

    (out, rest), (more, more_rest) = results(value), results(3 * value)
    assert not torch.allclose(3 * out, more, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(3 * (out + rest), more + more_rest, rtol=1e-5, atol=1e-5)
    assert (rest[:, :, 0] == 0).all(), "the first row is a value"


@pytest.mark.parametrize(
    ("stored", "numbers", "dtype"),
    [
        (True, (1.0, 1, 0.0), torch.float16),
        (True, (1.0, 2, 0.0), torch.bfloat16),
        (True, (-1.0, 1, -0.2), torch.bfloat16),
        (False, (1.0, 1, 0.18), torch.bfloat16),
        (False, (-1.0, 1, 0.0), torch.bfloat16),
        (False, (1.0, 0, 0.0), torch.bfloat16),
        (False, (1.0, 1, 0.0), torch.float32),
    ],
)
def test_only_calls_that_need_it_store_it(
    stored: bool, numbers: tuple[float, int, float], dtype: torch.dtype
) -> None:
    """Not known weak repulsion, attraction with a sweep for D, listing factors and float32."""
    from saobp.kernels.causal.launch import saved_tensors

    sign, receives, bound = numbers
    states = torch.empty(1, 2, 300, 64, dtype=dtype, device="meta")
    spec: CallSpec = spec_of(states, states, None, None, 300, 0.125, 0.0, sign, receives, bound)
    shape, kind = saved_tensors(spec)["rest"]
    assert kind == dtype
    assert shape == (states.shape if stored else (0,))

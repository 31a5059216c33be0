"""Infinite and not-a-number states in hidden places: the CPU inference path is as clean as the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saobp
from saobp.testing.inputs import attention_inputs

FACTORS = ["none", "high", "low", "high-listing", "low-listing", "elemmul", "elemmul-prior"]
BATCH, HEADS, LENGTH, DIM = 2, 2, 5, 4

bad = st.sampled_from([math.nan, math.inf, -math.inf, 3e38])
places = st.tuples(
    st.integers(0, 2),
    st.integers(0, BATCH - 1),
    st.integers(0, HEADS - 1),
    st.integers(0, LENGTH - 1),
    st.integers(0, DIM - 1),
)


@given(
    factor=st.sampled_from(FACTORS),
    causal=st.booleans(),
    real=st.none() | st.lists(st.booleans(), min_size=BATCH * LENGTH, max_size=BATCH * LENGTH),
    spots=st.lists(st.tuples(places, bad), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=400, deadline=None)
def test_what_is_finite_in_the_reference_is_equal_on_the_cpu_path(
    factor: str, causal: bool, real: list[bool] | None, spots: list, seed: int
) -> None:
    inputs = attention_inputs(BATCH, HEADS, LENGTH, DIM, seed=seed)
    states = inputs.query, inputs.key, inputs.value
    for (which, *place), value in spots:
        states[which][tuple(place)] = value
    mask = None if real is None else torch.tensor(real).view(BATCH, LENGTH)
    options = {"attention_mask": mask, "is_causal": causal}
    expected = saobp.attention(*states, f"{factor}:0.7", backend="reference", **options)  # type: ignore[arg-type]
    found = saobp.attention(*states, f"{factor}:0.7", **options)  # type: ignore[arg-type]
    clean = expected.isfinite()
    if factor != "none" and all(which < 2 for (which, *_), _ in spots):
        # PyTorch's own attention gives 0 for a row of NaN; the reference NaN for one that sees no value.
        assert (found.isfinite() == clean).all()
    torch.testing.assert_close(found[clean], expected[clean], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_later_key_and_a_padding_query_change_nothing(factor: str) -> None:
    inputs = attention_inputs(BATCH, HEADS, LENGTH, DIM)
    states = inputs.query, inputs.key, inputs.value
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[:, -1] = False
    for options in ({"is_causal": True}, {"attention_mask": real}):
        expected = saobp.attention(*states, f"{factor}:0.7", **options)  # type: ignore[arg-type]
        for which, value in ((0, math.inf), (1, math.nan), (1, -math.inf)):
            changed = [x.clone() for x in states]
            changed[which][:, :, -1] = value
            found = saobp.attention(*changed, f"{factor}:0.7", **options)  # type: ignore[arg-type]
            torch.testing.assert_close(found[:, :, :-1], expected[:, :, :-1])

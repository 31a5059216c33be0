"""The vectorised specification against the paper's formulas written out as loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import saobp
from saobp.testing import oracles
from saobp.testing.dense_gap import dense_gap
from saobp.testing.oracles import Order, Rows

seeds = st.integers(0, 10_000)
strengths = st.floats(0.0, 4.0)
orders: st.SearchStrategy[Order] = st.sampled_from(["bidirectional", "strict", "paper"])


@st.composite
def masks(draw: st.DrawFn, length: int) -> list[bool] | None:
    """No padding, or any pattern of real tokens, also none at all."""
    return draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))


def refined(scores: Tensor, factor: str, strength: float, order: Order, real: list[bool] | None) -> Tensor:
    """The rows that saobp.attention uses: its output for an identity value."""
    length = scores.shape[-1]
    identity = torch.eye(length, dtype=scores.dtype).expand(1, 1, -1, -1)
    future = "paper" if order == "paper" else "strict"
    return saobp.attention(
        scores.expand(1, 1, -1, -1),
        identity,
        identity,
        saobp.Refinement(factor, strength, future=future),
        padding_mask=None if real is None else torch.tensor([real]),
        is_causal=order != "bidirectional",
        scale=1.0,
    )[0, 0]


def scores_of(seed: int, length: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(length, length, generator=random, dtype=torch.float64)


def assert_same(found: Tensor, expected: Rows) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:future='paper'")
@pytest.mark.parametrize("factor", ["high", "low"])
@given(data=st.data(), seed=seeds, length=st.integers(1, 6), strength=strengths, order=orders)
def test_equation_is_the_product_over_nodes(
    factor: str, data: st.DataObject, seed: int, length: int, strength: float, order: Order
) -> None:
    real, scores = data.draw(masks(length)), scores_of(seed, length)
    psi = {"high": oracles.high, "low": oracles.low}[factor](strength)
    expected = oracles.paper_product(oracles.masked_softmax(scores, order, real), psi, order, real)
    assert_same(refined(scores, factor, strength, order, real), expected)


@pytest.mark.filterwarnings("ignore:future='paper'")
@pytest.mark.parametrize("factor", ["high", "low"])
@given(data=st.data(), seed=seeds, length=st.integers(1, 6), strength=strengths, order=orders)
def test_key_bias_is_the_product_over_all_nodes_with_the_own(
    factor: str, data: st.DataObject, seed: int, length: int, strength: float, order: Order
) -> None:
    real, scores = data.draw(masks(length)), scores_of(seed, length)
    psi = {"high": oracles.high, "low": oracles.low}[factor](strength)
    prior = oracles.masked_softmax(scores, order, real)
    expected = oracles.paper_product(prior, psi, order, real, own=True)
    assert_same(refined(scores, f"{factor}-key-bias", strength, order, real), expected)


@pytest.mark.parametrize(("name", "iterations"), [("sinkhorn", 1), ("sinkhorn-3", 3)])
@given(data=st.data(), seed=seeds, length=st.integers(1, 6))
def test_sinkhorn_balances_columns_and_rows(
    name: str, iterations: int, data: st.DataObject, seed: int, length: int
) -> None:
    real, scores = data.draw(masks(length)), scores_of(seed, length)
    prior = oracles.masked_softmax(scores, "bidirectional", real)
    found = refined(scores, name, 0.0, "bidirectional", real)
    assert_same(found, oracles.sinkhorn(prior, iterations, real))


def test_many_sinkhorn_iterations_would_be_doubly_stochastic() -> None:
    scores = scores_of(0, 6)
    spread = [
        (refined(scores, name, 0.0, "bidirectional", None).sum(-2) - 1).abs().max()
        for name in ("none", "sinkhorn", "sinkhorn-3")
    ]
    assert spread[0] > 3 * spread[1] > 9 * spread[2]


def test_sinkhorn_raises_keys_that_underflow_in_every_row() -> None:
    """A key 200 nats below the others has weight 0 in single precision before it is balanced."""
    scores = scores_of(0, 4)
    scores[:, 2] -= 200
    expected = oracles.sinkhorn(oracles.masked_softmax(scores, "bidirectional"), 3)
    found = refined(scores.float(), "sinkhorn-3", 0.0, "bidirectional", None)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_sinkhorn_refuses_causal_attention() -> None:
    with pytest.raises(ValueError, match="no causal form"):
        refined(scores_of(0, 4), "sinkhorn", 0.0, "strict", None)


@pytest.mark.parametrize(("factor", "sign"), [("high-listing", 1), ("low-listing", -1)])
@given(data=st.data(), seed=seeds, length=st.integers(1, 6), strength=strengths)
def test_listing_is_algorithm_1(
    factor: str, sign: int, data: st.DataObject, seed: int, length: int, strength: float
) -> None:
    order: Order = data.draw(st.sampled_from(["bidirectional", "strict"]))
    real, scores = data.draw(masks(length)), scores_of(seed, length)
    prior = oracles.masked_softmax(scores, order, real)
    expected = oracles.listing(prior, sign * strength)
    if real is not None:
        expected = [row if real[j] else prior[j] for j, row in enumerate(expected)]
    assert_same(refined(scores, factor, strength, order, real), expected)


@pytest.mark.parametrize("with_prior", [False, True])
@given(data=st.data(), seed=seeds, length=st.integers(1, 6))
def test_elemmul_is_the_similarity_of_rows(
    with_prior: bool, data: st.DataObject, seed: int, length: int
) -> None:
    order: Order = data.draw(st.sampled_from(["bidirectional", "strict"]))
    real, scores = data.draw(masks(length)), scores_of(seed, length)
    expected = oracles.elemmul(
        oracles.masked_softmax(scores, order, real), order, real, with_prior=with_prior
    )
    name = "elemmul-prior" if with_prior else "elemmul"
    found = refined(scores, name, 0.0, order, real)
    blind = real is not None and not any(real)
    assert blind or not torch.isnan(found).any()
    assert_same(found, expected)


@given(seed=seeds, length=st.integers(1, 6), strength=strengths)
def test_one_step_of_loopy_propagation_is_the_equation(seed: int, length: int, strength: float) -> None:
    prior = scores_of(seed, length).softmax(-1)
    potential = oracles.potential_matrix(oracles.high(strength), length)
    exact, _ = oracles.loopy_propagation(prior, potential, steps=1)
    found = saobp.refine(prior, saobp.Refinement("high", strength))
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


@given(
    seed=seeds,
    length=st.integers(1, 6),
    strength=strengths,
    steps=st.integers(1, 4),
    factor=st.sampled_from(["high", "low"]),
)
def test_strict_causal_steps_are_exact(
    seed: int, length: int, strength: float, steps: int, factor: str
) -> None:
    """With messages of earlier nodes alone no node's message returns to it, so nothing is approximated."""
    prior = torch.tensor(oracles.masked_softmax(scores_of(seed, length), "strict"), dtype=torch.float64)
    psi = {"high": oracles.high, "low": oracles.low}[factor](strength)
    receives = torch.ones(length, length, dtype=torch.bool).tril(-1)
    exact, _ = oracles.loopy_propagation(prior, oracles.potential_matrix(psi, length), steps, receives)
    found = saobp.refine(prior, saobp.Refinement(factor, strength, steps=steps), is_causal=True)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


@given(
    seed=seeds,
    length=st.integers(1, 5),
    strength=strengths,
    damping=st.floats(0, 0.9),
    steps=st.integers(2, 3),
)
def test_damped_steps_as_loops(seed: int, length: int, strength: float, damping: float, steps: int) -> None:
    """Each step: prior times the messages of the current beliefs, then a share of the old belief kept."""
    prior = scores_of(seed, length).softmax(-1)
    gamma = 1 - math.exp(-strength)
    beliefs = prior
    for _ in range(steps):
        updated = prior.clone()
        for j in range(length):
            for i in range(length):
                if i != j:
                    updated[j] *= 1 - gamma * beliefs[i]
        updated = updated / updated.sum(-1, keepdim=True)
        beliefs = (1 - damping) * updated + damping * beliefs
    found = saobp.refine(prior, saobp.Refinement("high", strength, steps=steps, damping=damping))
    torch.testing.assert_close(found, beliefs, rtol=1e-10, atol=1e-12)


def test_a_single_step_is_never_damped() -> None:
    prior = scores_of(0, 4).softmax(-1)
    damped = saobp.refine(prior, saobp.Refinement("high", 1.0, damping=0.5))
    assert torch.equal(damped, saobp.refine(prior, saobp.Refinement("high", 1.0)))


def test_dense_steps_approach_exact_ones_for_weak_factors() -> None:
    """The approximation is of second order: four times weaker, sixteen times closer."""
    weak, moved = dense_gap(8, 0.05, 2)
    strong, _ = dense_gap(8, 0.2, 2)
    assert 12 < strong / weak < 20
    assert weak < 0.03 * moved
    assert dense_gap(8, 0.2, 1)[0] < 1e-14


@pytest.mark.parametrize("psi", [oracles.high(0.7), oracles.low(1.3)])
def test_propagation_on_a_tree_gives_the_marginals(psi: oracles.Potential) -> None:
    random = torch.Generator().manual_seed(0)
    prior = torch.rand(4, 3, generator=random, dtype=torch.float64)
    potential = oracles.potential_matrix(psi, 3)
    pairs = [(0, 1), (1, 2), (1, 3)]
    receives = torch.zeros(4, 4, dtype=torch.bool)
    for i, j in pairs:
        receives[i, j] = receives[j, i] = True
    beliefs, _ = oracles.loopy_propagation(prior, potential, 3, receives)
    torch.testing.assert_close(beliefs, oracles.marginals(prior, potential, pairs), rtol=1e-12, atol=0)


def test_two_rows_give_the_exact_marginals() -> None:
    """With two nodes the graph is a tree: the refined rows are marginals of the pairwise model."""
    prior = scores_of(3, 2).softmax(-1)
    expected = oracles.marginals(prior, oracles.potential_matrix(oracles.high(0.9), 2), [(0, 1)])
    torch.testing.assert_close(saobp.refine(prior, saobp.Refinement("high", 0.9)), expected)


@given(data=st.data(), seed=seeds, length=st.integers(1, 8), strength=strengths, stride=st.integers(1, 5))
@pytest.mark.parametrize("factor", ["high", "low"])
def test_messages_from_a_part_of_the_rows(
    factor: str, data: st.DataObject, seed: int, length: int, strength: float, stride: int
) -> None:
    real, scores = data.draw(masks(length)), scores_of(seed, length)
    identity = torch.eye(length, dtype=scores.dtype)
    found = saobp.attention(
        scores[None, None],
        identity[None, None],
        identity[None, None],
        saobp.Refinement(f"{factor}-key-bias", strength, message_stride=stride),
        attention_mask=None if real is None else torch.tensor([real]),
        scale=1.0,
    )
    rows = oracles.masked_softmax(scores, "bidirectional", real)
    psi = oracles.high(strength) if factor == "high" else oracles.low(strength)
    assert_same(found[0, 0], oracles.key_bias(rows, psi, stride, real))


@given(seed=seeds, before=st.integers(0, 4), after=st.integers(0, 4), stride=st.integers(1, 4))
def test_padding_does_not_change_which_rows_send(seed: int, before: int, after: int, stride: int) -> None:
    random = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 2, 7, 4, generator=random, dtype=torch.float64) for _ in range(3))
    refinement = saobp.Refinement("high-key-bias", 0.9, message_stride=stride)
    alone = saobp.attention(query, key, value, refinement)
    padded = [torch.nn.functional.pad(one, (0, 0, before, after)) for one in (query, key, value)]
    real = torch.nn.functional.pad(torch.ones(1, 7, dtype=torch.bool), (before, after))
    found = saobp.attention(*padded, refinement, attention_mask=real)
    torch.testing.assert_close(found[:, :, before : before + 7], alone, rtol=1e-10, atol=1e-12)


def test_gradients_of_messages_from_a_part_of_the_rows() -> None:
    random = torch.Generator().manual_seed(0)
    states = [torch.randn(1, 1, 5, 3, generator=random, dtype=torch.float64) for _ in range(3)]
    strength = torch.tensor([0.7], dtype=torch.float64)
    leaves = [one.requires_grad_() for one in (*states, strength)]

    def attend(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        refinement = saobp.Refinement("high-key-bias", "learned", message_stride=2)
        return saobp.attention(query, key, value, refinement, strength=strength)

    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize("call", [saobp.attention, saobp.refine])
def test_messages_from_a_part_of_the_rows_have_no_causal_form(call: Callable[..., Tensor]) -> None:
    states = [torch.rand(1, 1, 4, 4) for _ in range(3 if call is saobp.attention else 1)]
    with pytest.raises(ValueError, match="message_stride has no causal form"):
        call(*states, saobp.Refinement("high-key-bias", 0.3, message_stride=2), is_causal=True)

"""The oracle against a public belief-propagation library; skipped where none is installed.

Both libraries were tried once in an environment of their own: see ``docs/operation.md``.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from saobp.testing.oracles import high, loopy_propagation, low, marginals, potential_matrix

GRAPHS = {
    "pair": (2, [(0, 1)]),
    "chain": (3, [(0, 1), (1, 2)]),
    "triangle": (3, [(0, 1), (1, 2), (0, 2)]),
}


def prior_of(nodes: int, labels: int) -> Tensor:
    random = torch.Generator().manual_seed(nodes * labels)
    return torch.randn(nodes, labels, generator=random, dtype=torch.float64).softmax(-1)


def both_ways(nodes: int, pairs: list[tuple[int, int]]) -> Tensor:
    receives = torch.zeros(nodes, nodes, dtype=torch.bool)
    for i, j in pairs:
        receives[i, j] = receives[j, i] = True
    return receives


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("labels", [3, 4])
@pytest.mark.parametrize("psi", [high(0.6), low(0.6)], ids=["high", "low"])
def test_loopy_beliefs_agree_with_factorgraph(graph: str, labels: int, psi) -> None:
    factorgraph = pytest.importorskip("factorgraph")
    nodes, pairs = GRAPHS[graph]
    prior, potential = prior_of(nodes, labels), potential_matrix(psi, labels)
    theirs = factorgraph.Graph()
    variables = [theirs.rv(f"x{i}", labels) for i in range(nodes)]
    for i, variable in enumerate(variables):
        theirs.factor([variable], potential=prior[i].numpy())
    for i, j in pairs:
        theirs.factor([variables[i], variables[j]], potential=potential.numpy())
    for restart in range(50):  # it stops when messages move by less than 1e-5: go on from there
        theirs.lbp(init=restart == 0, normalize=True, max_iters=200)
    ours, _ = loopy_propagation(prior, potential, 200, both_ways(nodes, pairs))
    for variable, belief in theirs.rv_marginals(normalize=True):
        expected = ours[int(variable.name.removeprefix("x"))]
        torch.testing.assert_close(
            torch.tensor(belief, dtype=torch.float64), expected, rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("labels", [3, 4])
@pytest.mark.parametrize("psi", [high(0.6), low(0.6)], ids=["high", "low"])
def test_exact_marginals_agree_with_pgmpy(graph: str, labels: int, psi) -> None:
    pytest.importorskip("pgmpy")
    from pgmpy.factors.discrete import DiscreteFactor
    from pgmpy.inference import BeliefPropagation
    from pgmpy.models import DiscreteMarkovNetwork

    nodes, pairs = GRAPHS[graph]
    prior, potential = prior_of(nodes, labels), potential_matrix(psi, labels)
    theirs = DiscreteMarkovNetwork([(f"x{i}", f"x{j}") for i, j in pairs])
    for i in range(nodes):
        theirs.add_factors(DiscreteFactor([f"x{i}"], [labels], prior[i].numpy()))
    for i, j in pairs:
        theirs.add_factors(DiscreteFactor([f"x{i}", f"x{j}"], [labels, labels], potential.numpy()))
    inference = BeliefPropagation(theirs)
    exact = marginals(prior, potential, pairs)
    beliefs, _ = loopy_propagation(prior, potential, 10, both_ways(nodes, pairs))
    for i, oracle in itertools.product(range(nodes), [exact] if graph == "triangle" else [exact, beliefs]):
        found = torch.tensor(inference.query([f"x{i}"], show_progress=False).values, dtype=torch.float64)
        torch.testing.assert_close(found, oracle[i], rtol=1e-9, atol=1e-12)

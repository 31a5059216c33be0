"""The paper's formulas written out literally, as a reference for the vectorised code.

One head at a time, double precision, plain Python numbers: slow and easy to compare with the paper.
Rows are ``[node][label]``, every visible row summing to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Rows = list[list[float]]
Potential = Callable[[int, int], float]
Order = Literal["bidirectional", "strict", "paper"]


def high(strength: float) -> Potential:
    """psi of BP-High: e^strength for different labels, 1 for equal ones."""
    return lambda r, k: math.exp(strength) if r != k else 1.0


def low(strength: float) -> Potential:
    """psi of BP-Low: e^(-strength) for different labels, 1 for equal ones."""
    return lambda r, k: math.exp(-strength) if r != k else 1.0


def masked_softmax(scores: Tensor, order: Order, real: Sequence[bool] | None = None) -> Rows:
    """The prior ``[node][label]``: softmax over real keys, and earlier ones unless bidirectional."""
    length = scores.shape[-1]
    real = real or [True] * length
    prior = []
    for j in range(length):
        seen = [real[k] and (order == "bidirectional" or k <= j) for k in range(length)]
        top = max((float(scores[j, k]) for k in range(length) if seen[k]), default=0.0)
        prior.append(
            _normalised([math.exp(float(scores[j, k]) - top) if seen[k] else 0.0 for k in range(length)])
        )
    return prior


def paper_product(
    rows: Rows, psi: Potential, order: Order, real: Sequence[bool] | None = None, *, own: bool = False
) -> Rows:
    """Prior times the messages of all other real nodes, each message the sum over r of psi(r, k) A_ir.

    ``strict`` takes the nodes before j alone; ``paper`` takes them all, on rows that are causal already.
    ``own`` includes node j itself.
    """
    length = len(rows)
    real = real or [True] * length
    beliefs = []
    for j in range(length):
        belief = []
        for k in range(length):
            product = rows[j][k]
            for i in range(length):
                if (i == j and not own) or not real[i] or (order == "strict" and i > j):
                    continue
                product *= sum(psi(r, k) * rows[i][r] for r in range(length))
            belief.append(product)
        beliefs.append(_normalised(belief))
    return beliefs


def key_bias(rows: Rows, psi: Potential, stride: int, real: Sequence[bool] | None = None) -> Rows:
    """Prior times messages of every ``stride``-th real node, to the power of real over sending nodes.

    With stride 1 that is ``paper_product`` with the own message included.
    """
    length = len(rows)
    nodes = [i for i in range(length) if real is None or real[i]]
    senders = nodes[::stride]
    beliefs = []
    for j in range(length):
        belief = []
        for k in range(length):
            product = rows[j][k]
            for i in senders:
                message = sum(psi(r, k) * rows[i][r] for r in range(length))
                product *= message ** (len(nodes) / len(senders))
            belief.append(product)
        beliefs.append(_normalised(belief))
    return beliefs


def listing(rows: Rows, strength: float) -> Rows:
    """Algorithm 1 line by line: the product runs over the labels of one row. Rows that see nothing stay."""
    length = len(rows)
    beliefs = []
    for j in range(length):
        total = sum(rows[j])
        if not total:
            beliefs.append(rows[j])
            continue
        message = [math.exp(strength) * total + (1 - math.exp(strength)) * rows[j][k] for k in range(length)]
        product = math.prod(message)
        without_self = [product / message[k] for k in range(length)]
        beliefs.append(_normalised([rows[j][k] * without_self[k] for k in range(length)]))
    return beliefs


def sinkhorn(rows: Rows, iterations: int, real: Sequence[bool] | None = None) -> Rows:
    """Columns divided by their sums over real rows, then all rows by theirs, so many times."""
    length = len(rows)
    real = real or [True] * length
    for _ in range(iterations):
        received = [sum(rows[i][k] for i in range(length) if real[i]) for k in range(length)]
        rows = [
            _normalised([x / r if r else 0.0 for x, r in zip(row, received, strict=True)]) for row in rows
        ]
    return rows


def elemmul(
    rows: Rows, order: Order, real: Sequence[bool] | None = None, *, with_prior: bool = False
) -> Rows:
    """Similarity of rows, normalised over the tokens that row i may see; ``with_prior`` weighs it by A_ij."""
    length = len(rows)
    real = real or [True] * length
    beliefs = []
    for i in range(length):
        belief = []
        for j in range(length):
            seen = real[j] and (order == "bidirectional" or j <= i)
            alike = sum(rows[i][k] * rows[j][k] for k in range(length)) if seen else 0.0
            belief.append(alike * rows[i][j] if with_prior else alike)
        beliefs.append(_normalised(belief))
    return beliefs


def loopy_propagation(
    prior: Tensor, potential: Tensor, steps: int, receives: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum-product belief propagation with cavity messages: the message from i to j excludes the one from j.

    prior ``[nodes, labels]``, potential psi ``[labels, labels]``, ``receives[j, i]`` True where an edge
    carries messages from i to j (default: every other node). All messages are sent at once, starting from
    uniform ones. Returns beliefs ``[nodes, labels]`` and log messages ``[from, to, labels]``.
    """
    nodes, labels = prior.shape
    edges = ~torch.eye(nodes, dtype=torch.bool) if receives is None else receives.T
    messages = prior.new_zeros(nodes, nodes, labels)
    for _ in range(steps):
        updated = torch.zeros_like(messages)
        for i in range(nodes):
            for j in range(nodes):
                if not edges[i, j]:
                    continue
                received = messages[:, i].sum(0) - messages[j, i]
                cavity = torch.softmax(prior[i].log() + received, -1)
                updated[i, j] = torch.log_softmax((cavity @ potential).log(), -1)
        messages = updated
    return torch.softmax(prior.log() + messages.sum(0), -1), messages


def potential_matrix(psi: Potential, labels: int) -> Tensor:
    """psi as ``[labels, labels]`` in double precision."""
    return torch.tensor([[psi(r, k) for k in range(labels)] for r in range(labels)], dtype=torch.float64)


def marginals(prior: Tensor, potential: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Exact marginals ``[nodes, labels]`` by summing over every joint state; for a handful of nodes."""
    nodes, labels = prior.shape
    total = torch.zeros_like(prior)
    for state in torch.cartesian_prod(*[torch.arange(labels)] * nodes).view(-1, nodes).tolist():
        weight = math.prod(float(prior[i, state[i]]) for i in range(nodes))
        weight *= math.prod(float(potential[state[i], state[j]]) for i, j in pairs)
        for i in range(nodes):
            total[i, state[i]] += weight
    return total / total.sum(-1, keepdim=True)


def _normalised(values: list[float]) -> list[float]:
    total = sum(values)
    return [value / total for value in values] if total else values

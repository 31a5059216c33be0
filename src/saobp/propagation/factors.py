"""Pairwise factors: the messages that a row of attention sends to other rows about each key.

A factor is a small object with ``log_messages``. Leaving out the own message, the prior, padding, the
order of causal rows and further steps are shared and live in ``beliefs.py``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saobp.refinement import add_factor_name

if TYPE_CHECKING:
    from saobp.propagation.graph import FactorGraph


STRONG = 4.0
"""Up to this strength log(1 - gamma A) loses less than 4e-6 in float32 where A rounds near 1."""


class Factor(ABC):
    """A pairwise potential between rows, given by the message that one row's belief sends."""

    has_strength: bool = True
    """Whether the strength enters; a factor without one needs no value for it."""

    includes_own_message: bool = False
    """Whether a row also receives its own message; without causality all rows then share one bias per key."""

    remembers: bool = True
    """Whether rows receive messages of earlier rows, whose sum cached decoding must carry."""

    def obstacle(self, queries: int, keys: int, causal: bool) -> str | None:  # noqa: ARG002
        """Why a map of this size, with messages in order if ``causal``, cannot be refined; None if it can."""
        return None

    @abstractmethod
    def log_messages(self, beliefs: Tensor, strength: Tensor) -> Tensor:
        """Log message of every node about every label.

        beliefs ``[..., node, label]``, strength broadcastable to it; the result has the shape of beliefs.
        The neutral message is 0. A row that sees no key is all zero: its messages are masked afterwards, but
        they and their gradient must be finite.
        """

    def log_belief(self, log_prior: Tensor, beliefs: Tensor, strength: Tensor, graph: FactorGraph) -> Tensor:
        """Unnormalised log belief of every node: its prior and received messages. ``[..., node, label]``"""
        messages = self.log_messages(beliefs, strength)
        actual = tuple(messages.shape) if isinstance(messages, Tensor) else type(messages).__name__
        if actual != beliefs.shape:
            raise ValueError(
                f"{type(self).__name__}.log_messages must give one number for every entry of beliefs "
                f"{tuple(beliefs.shape)}, not {actual}"
            )
        return log_prior + graph.incoming(messages, include_own=self.includes_own_message)


class Potts(Factor):
    """Potts factor: weight e^strength for two rows on different keys, 1 for two rows on the same key.

    Divided by e^strength, which cancels, the message of row i about key k is 1 - gamma A_ik with
    gamma = 1 - e^(-strength). ``sign=-1`` turns repulsion (high) into attraction (low).
    """

    def __init__(self, sign: int = 1) -> None:
        self.sign = sign

    def log_messages(self, beliefs: Tensor, strength: Tensor) -> Tensor:
        """log(1 - gamma A), and near A = 1, where that cancels, log(1 - A + A e^(-strength)).

        1 - A is the sum of the row's other weights, so e^(-strength) down to e^-16 is resolved in float32.
        """
        repulsion = self.sign * strength
        if _is_weak(repulsion):
            return torch.log1p(beliefs * torch.expm1(-repulsion))
        near_one = beliefs > 0.5
        small = beliefs.masked_fill(near_one, 0.0)
        kept = small.sum(-1, keepdim=True) + beliefs * torch.exp(-repulsion)
        return torch.where(near_one, kept, 1.0).log() + torch.log1p(small * torch.expm1(-repulsion))


def _is_weak(repulsion: Tensor) -> bool:
    """Whether 1 - gamma A is exact enough for every head; False where reading it would sync or fail."""
    if repulsion.device.type != "cpu" or type(repulsion) is not Tensor or torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing() or torch._C._functorch.is_functorch_wrapped_tensor(repulsion):
        return False
    return bool((repulsion <= STRONG).all())


class PottsKeyBias(Potts):
    """Potts factor with the own message included: softmax_k(s_jk + c_k), c_k = sum_i log(1 - gamma A_ik).

    Strict causal rows receive messages of rows i <= j only.
    """

    includes_own_message = True


class PottsListing(Potts):
    """The paper's Algorithm 1: its product over labels cancels; a row receives its own message, inverted."""

    remembers = False

    def log_belief(self, log_prior: Tensor, beliefs: Tensor, strength: Tensor, graph: FactorGraph) -> Tensor:
        return log_prior - graph.mask_messages(self.log_messages(beliefs, strength))


class Sinkhorn(Factor):
    """Sinkhorn normalisation: each iteration divides every column by its sum and then every row by its sum.
    For comparison; it has no strength and no strict causal form.
    """

    has_strength = False

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations

    def obstacle(self, queries: int, keys: int, causal: bool) -> str | None:  # noqa: ARG002
        if not causal:
            return None
        return (
            "Sinkhorn attention balances what a key receives from all rows, later ones too, so it has no "
            "causal form: use it in an encoder"
        )

    def log_messages(self, beliefs: Tensor, strength: Tensor) -> Tensor:  # noqa: ARG002
        return -torch.log(floored(beliefs.sum(-2, keepdim=True))).expand_as(beliefs)

    def log_belief(self, log_prior: Tensor, beliefs: Tensor, strength: Tensor, graph: FactorGraph) -> Tensor:  # noqa: ARG002
        sends_nothing = graph.mask_messages(torch.ones_like(log_prior)) == 0
        least = torch.finfo(log_prior.dtype).min / 4
        log_rows = log_prior
        for _ in range(self.iterations):
            received = log_rows.masked_fill(sends_nothing, least).logsumexp(-2, keepdim=True)
            received = received.masked_fill(received < least / 2, 0.0)  # a key that no row sees
            log_rows = torch.log_softmax(graph.mask_scores(log_rows - received), -1)
        return log_rows


class Similarity(Factor):
    """ElemMul: rows attend to tokens with similar rows, A A^T. With ``prior``, A o (A A^T)."""

    has_strength = False

    def __init__(self, prior: bool = False) -> None:
        self.prior = prior

    def obstacle(self, queries: int, keys: int, causal: bool) -> str | None:  # noqa: ARG002
        if queries == keys:
            return None
        needs = f"it needs as many queries as keys, not {queries} and {keys}"
        return f"ElemMul compares every row with every other: {needs}"

    def log_messages(self, beliefs: Tensor, strength: Tensor) -> Tensor:  # noqa: ARG002
        return torch.log(floored(similarity(beliefs)))

    def log_belief(self, log_prior: Tensor, beliefs: Tensor, strength: Tensor, graph: FactorGraph) -> Tensor:  # noqa: ARG002
        alike = self.log_messages(beliefs, strength)
        return alike + log_prior if self.prior else alike


def similarity(rows: Tensor) -> Tensor:
    """A A^T for rows A.

    Not by ``SelfProduct`` under the compiler, which rejects functions with a ``jvp``, nor in a trace, which
    could not be saved.
    """
    if torch.autograd.forward_ad._current_level >= 0 or torch.jit.is_tracing():
        return rows @ rows.transpose(-1, -2)
    return SelfProduct.apply(rows)


class SelfProduct(torch.autograd.Function):
    """A A^T, whose gradient is one product with a symmetric matrix.

    Left to autograd it is the sum of two products, one of them transposed. Inductor fuses that sum with the
    gradient of softmax into a kernel that stores and reloads it without a barrier (PyTorch's pull
    request 190519 has more): with one of its tile sizes threads load what others have not stored yet.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor) -> Tensor:
        return rows @ rows.transpose(-1, -2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return (gradient + gradient.transpose(-1, -2)) @ rows


def floored(values: Tensor) -> Tensor:
    """Clamps from below, so that where two rows share no key log and 1 / value stay finite."""
    precision = torch.finfo(values.dtype)
    return values.clamp(min=precision.tiny / precision.eps)


_FACTORS: dict[str, Factor | None] = {
    "none": None,
    "high": Potts(+1),
    "low": Potts(-1),
    "elemmul": Similarity(),
    "high-listing": PottsListing(+1),
    "low-listing": PottsListing(-1),
    "elemmul-prior": Similarity(prior=True),
    "high-key-bias": PottsKeyBias(+1),
    "low-key-bias": PottsKeyBias(-1),
    "sinkhorn": Sinkhorn(1),
    "sinkhorn-3": Sinkhorn(3),
}
_BUILT_IN = frozenset(_FACTORS)
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def get_factor(name: str) -> Factor | None:
    """The factor of that name; ``none`` has none."""
    return _FACTORS[name]


def has_strength(name: str) -> bool:
    """Whether the factor of that name is weighted by a strength."""
    factor = get_factor(name)
    return factor is not None and factor.has_strength


def register_factor(name: str, factor: Factor) -> Factor:
    """Make a factor available by name in all refinements: functions, plug-in, training, metrics."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a factor's name is made of letters, digits, '-' and '_', unlike {name!r}")
    if name in _BUILT_IN:
        raise ValueError(f"{name!r} is a built-in factor: register yours under another name")
    if not isinstance(factor, Factor):
        raise TypeError(f"a factor must be an instance of saobp.Factor, not {factor!r}")
    _FACTORS[name] = factor
    add_factor_name(name)
    return factor

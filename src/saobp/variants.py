"""Other changes to attention, to compare or combine with a refinement.

Each is a small module next to an attention module's refinement, in plain PyTorch. ``high:learned+gate``
refines and gates; ``gate`` alone gates plain attention. Statistics of heads include the variants' changes
of scores, without the part of a row that a sink takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import scaled_scores, weighted_values

States = tuple[Tensor, Tensor, Tensor]
Weights = Callable[[], States]

OPEN = 3.0
"""Initial bias of gates: sigmoid of it is 0.95."""


class Variant(nn.Module):
    """One change to attention; parameters with a few numbers per head are called ``head_bias``.

    They have no weight decay and learn at the rate of learned strengths.
    """

    needs_inputs = False
    """Whether ``output`` or ``strength`` reads the inputs of the attention module."""
    reads_positions = False
    """Whether ``strength`` depends on the positions of queries and keys."""

    def __init__(self, heads: int, width: int, dim: int, like: Tensor) -> None:  # noqa: ARG002
        """For so many heads of size ``dim`` on inputs of a width; parameters have the type of ``like``."""
        super().__init__()

    def update(self, weights: Weights) -> None:
        """Adapt buffers to the projections; called once per training step, before ``states``.

        weights returns the projection matrices ``[outputs, width]`` of query, key and value.
        """

    def states(self, query: Tensor, key: Tensor, value: Tensor, weights: Weights) -> States:  # noqa: ARG002
        """Changed states ``[batch, heads, length, dim]``; weights as for ``update``."""
        return query, key, value

    def strength(self, strength: Tensor, lengths: tuple[int, int], inputs: Tensor | None) -> Tensor:  # noqa: ARG002
        """Changed strengths, ``[heads]`` or ``[steps or 1, batch or 1, heads, queries or 1, keys or 1]``.

        lengths are the numbers of queries and keys; the last query is the last key. inputs as for ``output``.
        """
        return strength

    def output(self, output: Tensor, inputs: Tensor | None) -> Tensor:  # noqa: ARG002
        """Changed output of each head ``[batch, heads, queries, dim]``.

        inputs ``[batch, queries, width]`` are those of the attention module.
        """
        return output

    def reset_parameters(self) -> None:
        """Reset to the initial values."""
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, OPEN if name == "gate_bias" else 0.0)


class SigmaReparam(Variant):
    """Projections W of queries, keys and values become gain * W / (largest singular value of W).

    The gain is learned and starts at 1. One power iteration per training step finds the singular value; its
    vector is a buffer. Projections have no biases, so that scaling states is equivalent.
    """

    directions: Tensor

    def __init__(self, heads: int, width: int, dim: int, like: Tensor) -> None:
        super().__init__(heads, width, dim, like)
        self.gain_bias = nn.Parameter(like.new_empty(3))
        precision = torch.promote_types(like.dtype, torch.float32)
        self.register_buffer("directions", like.new_empty(3, width, dtype=precision))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain_bias)
        start = torch.arange(self.directions.shape[1], device=self.directions.device).cos()
        with torch.no_grad():
            self.directions.copy_(functional.normalize(start, dim=0))

    @torch.no_grad()
    def update(self, weights: Weights) -> None:
        for role, weight in enumerate(weights()):
            matrix = weight.to(self.directions.dtype)
            product = matrix.mT @ (matrix @ self.directions[role])
            self.directions[role] = functional.normalize(product, dim=0)

    def states(self, query: Tensor, key: Tensor, value: Tensor, weights: Weights) -> States:
        scaled = []
        for role, (states, weight) in enumerate(zip((query, key, value), weights(), strict=True)):
            matrix = weight.to(self.directions.dtype)
            sigma = (matrix @ self.directions[role].clone()).norm()
            scaled.append(states * (self.gain_bias[role] / sigma).to(states.dtype))
        return scaled[0], scaled[1], scaled[2]


class PerHead(Variant):
    """A variant that learns one number per head, which starts at 0."""

    def __init__(self, heads: int, width: int, dim: int, like: Tensor) -> None:
        super().__init__(heads, width, dim, like)
        self.head_bias = nn.Parameter(like.new_zeros(heads))


class Temperature(PerHead):
    """Scores times e^b with b learned per head: a temperature that starts at 1."""

    def states(self, query: Tensor, key: Tensor, value: Tensor, weights: Weights) -> States:  # noqa: ARG002
        return query * by_head(self.head_bias.exp(), query), key, value


class QKNorm(PerHead):
    """Queries and keys of each head divided by their root mean square, scores times e^b per head."""

    def states(self, query: Tensor, key: Tensor, value: Tensor, weights: Weights) -> States:  # noqa: ARG002
        return unit_scale(query) * by_head(self.head_bias.exp(), query), unit_scale(key), value


class QueryBias(Variant):
    """A learned vector w added to each head's queries (after rotary positions): key k gets a bias w . k."""

    def __init__(self, heads: int, width: int, dim: int, like: Tensor) -> None:
        super().__init__(heads, width, dim, like)
        self.query_bias = nn.Parameter(like.new_zeros(heads, dim))

    def states(self, query: Tensor, key: Tensor, value: Tensor, weights: Weights) -> States:  # noqa: ARG002
        return query + self.query_bias.unsqueeze(-2).to(query.dtype), key, value


class Gate(Variant):
    """Each head's output times the sigmoid of a linear function of the layer's input."""

    needs_inputs = True

    def __init__(self, heads: int, width: int, dim: int, like: Tensor) -> None:
        super().__init__(heads, width, dim, like)
        self.gate_weight = nn.Parameter(like.new_zeros(heads, width))
        self.gate_bias = nn.Parameter(like.new_full((heads,), OPEN))

    def output(self, output: Tensor, inputs: Tensor | None) -> Tensor:
        assert inputs is not None
        gates = functional.linear(inputs.to(self.gate_weight.dtype), self.gate_weight, self.gate_bias)
        return output * gates.sigmoid().mT.unsqueeze(-1).to(output.dtype)


class PlusOne(Variant):
    """Softmax with one more in the denominator: e^s_jk / (1 + sum_l e^s_jl). Rows may attend to nothing."""

    def sink(self, scores: Tensor) -> Tensor:
        """Logit of attending to nothing, broadcastable to ``[batch, heads, queries]``."""
        return scores.new_zeros(())

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: FactorGraph,
        *,
        bias: Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output and rows; arguments as in ``reference_attention``."""
        scores = graph.mask_scores(scaled_scores(query, key, bias, scale))
        kept = torch.sigmoid(scores.logsumexp(-1) - self.sink(scores)).unsqueeze(-1)
        rows = graph.mask_rows(torch.softmax(scores, -1) * kept).to(query.dtype)
        return weighted_values(rows, value, dropout_p), rows


class Sink(PlusOne):
    """The same with a learned logit b per head: e^s_jk / (e^b + sum_l e^s_jl)."""

    def __init__(self, heads: int, width: int, dim: int, like: Tensor) -> None:
        super().__init__(heads, width, dim, like)
        self.head_bias = nn.Parameter(like.new_zeros(heads))

    def sink(self, scores: Tensor) -> Tensor:
        return self.head_bias.to(scores.dtype).view(-1, 1)


class Alternating(Variant):
    """Strength 1 + b in every other head and -1 + b in the rest, b learned: both signs from the start."""

    def strength(self, strength: Tensor, lengths: tuple[int, int], inputs: Tensor | None) -> Tensor:  # noqa: ARG002
        heads = torch.arange(len(strength), device=strength.device)
        return strength + (1 - 2 * (heads % 2)).to(strength.dtype)


class ByDistance(Variant):
    """Strength b + b_d of the message about a key at distance d from the row that sends it, per head.

    d falls into the buckets 0, 1, 2, 3-4, 5-8, 9-16, 17-32 and beyond. All rows still share one sum of
    messages per key.
    """

    reads_positions = True

    def __init__(self, heads: int, width: int, dim: int, like: Tensor) -> None:
        super().__init__(heads, width, dim, like)
        self.head_bias = nn.Parameter(like.new_zeros(heads, len(EDGES) + 1))

    def strength(self, strength: Tensor, lengths: tuple[int, int], inputs: Tensor | None) -> Tensor:  # noqa: ARG002
        queries, keys = lengths
        positions = torch.arange(keys, device=strength.device)
        distance = (positions[keys - queries :, None] - positions).abs()
        bucket = sum(((distance > edge).long() for edge in EDGES), torch.zeros_like(distance))
        chosen = bucket.unsqueeze(-1) == torch.arange(len(EDGES) + 1, device=strength.device)
        return full_strength(strength) + (chosen * self.head_bias[:, None, None]).sum(-1)


class LaterSteps(PerHead):
    """Strength b in the first step and b + c in those after it, both learned per head."""

    def strength(self, strength: Tensor, lengths: tuple[int, int], inputs: Tensor | None) -> Tensor:  # noqa: ARG002
        strength = full_strength(strength)
        return torch.cat([strength, strength + self.head_bias.view(-1, 1, 1)])


class MessageGate(Variant):
    """Strength of a row's messages times twice the sigmoid of a linear function of the layer's input."""

    needs_inputs = True

    def __init__(self, heads: int, width: int, dim: int, like: Tensor) -> None:
        super().__init__(heads, width, dim, like)
        self.gate_weight = nn.Parameter(like.new_zeros(heads, width))

    def strength(self, strength: Tensor, lengths: tuple[int, int], inputs: Tensor | None) -> Tensor:  # noqa: ARG002
        assert inputs is not None
        gates = functional.linear(inputs.to(self.gate_weight.dtype), self.gate_weight)
        return full_strength(strength) * 2 * gates.sigmoid().mT.unsqueeze(-1).to(strength.dtype)


EDGES = (0, 1, 2, 4, 8, 16, 32)
"""Largest distance of each bucket of ``ByDistance`` but the last."""


KINDS: dict[str, type[Variant]] = {
    "temperature": Temperature,
    "qk-norm": QKNorm,
    "query-bias": QueryBias,
    "sigma-reparam": SigmaReparam,
    "gate": Gate,
    "sink": Sink,
    "softmax-plus-one": PlusOne,
    "alternating": Alternating,
    "by-distance": ByDistance,
    "later-steps": LaterSteps,
    "message-gate": MessageGate,
}


def full_strength(strength: Tensor) -> Tensor:
    """``[heads]`` as ``[1, 1, heads, 1, 1]``; other strengths as they are."""
    return strength.view(1, 1, -1, 1, 1) if strength.ndim == 1 else strength


def by_head(values: Tensor, states: Tensor) -> Tensor:
    """``[heads]`` to multiply states ``[batch, heads, length, dim]`` with."""
    return values.view(-1, 1, 1).to(states.dtype)


def unit_scale(states: Tensor) -> Tensor:
    """``[..., dim]`` divided by the root mean square over the last dimension."""
    return functional.rms_norm(states, states.shape[-1:], eps=1e-6)

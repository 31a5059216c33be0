"""Statistics of long texts from queries and keys alone, with error bars and linear memory.

Norms come from random signs sent through attention (A z is attention with values z), row entropies from exact
rows of drawn queries, and the paths of those rows from products with A^T. Sink mass needs one such product
and no sampling.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saobp.metrics.entropy import normalised_rows, row_entropy
from saobp.metrics.estimates import Estimate, Strata, balanced_signs, draw_rows, exactly, share_of
from saobp.metrics.operators import AttentionOperator, PlainOperator, SimilarityOperator
from saobp.metrics.tiles import Mask, TiledOperator
from saobp.refinement import Refinement

SAMPLED = ("gtd", "indirect_entropy", "attention_entropy", "sink_mass")


@dataclass(frozen=True)
class Sampling:
    """How much is drawn: random signs for the norms, queries for the entropies, and the seed of both.

    With two more channels, for anchor and column sums, 62 fill the width of a usual head.
    """

    probes: int = 62
    rows: int = 62
    seed: int = 0

    def __post_init__(self) -> None:
        if self.probes < 2 or self.rows < 4:
            raise ValueError(
                f"sampling needs at least 2 probes and 4 rows, not {self.probes} and {self.rows}"
            )


class Draws(NamedTuple):
    """The random part of an estimate, drawn once for all heads of a text."""

    rows: Strata
    signs: Tensor
    signs_scale: float

    @classmethod
    def of(cls, tokens: int, sampling: Sampling, generator: torch.Generator, causal: bool) -> Draws:
        rows = draw_rows(tokens, sampling.rows, generator, causal=causal)
        return cls(rows, *balanced_signs(tokens, sampling.probes, generator))


def operator_for(
    query: Tensor, key: Tensor, refinement: Refinement, strength: Tensor, mask: Mask, *, scale: float
) -> AttentionOperator:
    """Products with the maps of some heads of one text: query and key ``[heads, tokens, dim]``."""
    if refinement.is_plain and mask.is_plain:
        return PlainOperator(query, key, causal=mask.causal, scale=scale)
    if refinement.factor == "elemmul" and mask.is_plain and not mask.causal and refinement.steps == 1:
        return SimilarityOperator(PlainOperator(query, key, causal=False, scale=scale))
    return TiledOperator(query, key, refinement, strength, mask, scale=scale)


def estimate_text(
    operator: AttentionOperator,
    states: Tensor,
    wanted: Collection[str],
    beta: float,
    hops: int,
    draws: Draws,
) -> dict[str, Estimate]:
    """Estimates ``[heads]`` of the maps that ``operator`` stands for; states ``[heads, tokens, dim]``."""
    heads, tokens, _ = states.shape
    found: dict[str, Estimate] = {}
    drawn = draws.rows
    forward = backward = None
    if "gtd" in wanted:
        forward = draws.signs.to(states.dtype).expand(heads, -1, -1)
        norms = RunningNorms(draws.signs_scale, beta, hops)
    if "attention_entropy" in wanted or "indirect_entropy" in wanted:
        direct = operator.rows(drawn.places)
        if "attention_entropy" in wanted:
            found["attention_entropy"] = drawn.mean(row_entropy(direct))
        if "indirect_entropy" in wanted:
            backward = direct.transpose(-1, -2).to(states.dtype)
            paths = torch.zeros_like(backward, dtype=direct.dtype)
        del direct
    everyone = states.new_ones(heads, tokens, 1) if "sink_mass" in wanted else None

    for hop in range(1, hops + 1):
        if hop == hops:
            backward = None
        if everyone is not None:
            backward = everyone if backward is None else torch.cat([backward, everyone], -1)
        if forward is None and backward is None:
            break
        forward, backward = operator.sweep(forward, backward)
        if everyone is not None and backward is not None:
            received = backward[..., -1].to(torch.promote_types(backward.dtype, torch.float32))
            found["sink_mass"] = exactly(received.amax(-1) / tokens)
            backward = backward[..., :-1] if "indirect_entropy" in wanted else None
            everyone = None
        if forward is not None:
            norms.add(hop, forward)
        if backward is not None:
            paths += beta**hop * backward
    if "gtd" in wanted:
        found["gtd"] = norms.share()
    if "indirect_entropy" in wanted:
        found["indirect_entropy"] = drawn.mean(row_entropy(normalised_rows(paths.transpose(-1, -2))))
    return {name: _no_finer_than_rounding(result, states) for name, result in found.items()}


def _no_finer_than_rounding(result: Estimate, states: Tensor) -> Estimate:
    """The estimate with an error no smaller than what the states' type and long sums can resolve."""
    summed = torch.finfo(torch.promote_types(states.dtype, torch.float32)).eps * states.shape[-2] ** 0.5
    rounding = (torch.finfo(states.dtype).eps / 2 + summed) * result.value.abs().clamp(max=1)
    return result._replace(standard_error=torch.hypot(result.standard_error, rounding))


class RunningNorms:
    """Squared norms of A z and G z per probe, as powers of A are applied to the probes one by one."""

    def __init__(self, scale: float, beta: float, hops: int) -> None:
        self.scale, self.beta = scale, beta
        self.constant = sum(beta ** (hop - 1) for hop in range(2, hops + 1)) ** 2
        self.direct: Tensor | None = None
        self.paths: Tensor | None = None

    def add(self, hop: int, states: Tensor) -> None:
        """states ``[heads, tokens, probes]`` are A^hop z."""
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        if hop == 1:
            self.direct = states.square().sum(-2)
        elif self.paths is None:
            self.paths = self.beta ** (hop - 1) * states
        else:
            self.paths.add_(states, alpha=self.beta ** (hop - 1))

    def share(self) -> Estimate:
        """GTD; the constant vector's part, 1 for A and a power sum for G, is exact."""
        assert self.direct is not None
        assert self.paths is not None
        indirect = self.constant + self.scale * self.paths.square().sum(-2)
        return share_of(indirect, 1 + self.scale * self.direct)

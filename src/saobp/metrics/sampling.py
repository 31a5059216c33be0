"""Statistics of long texts from queries and keys alone, with error bars and linear memory.

Norms come from random signs sent through attention (A z is attention with values z), row entropies from exact
rows of drawn queries, and the paths of those rows from products with A^T. Sink mass needs one such product
and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saobp.extras import import_optional
from saobp.metrics.operators.plain import AttentionOperator


class Estimate(NamedTuple):
    """value, standard_error and the error's own degrees of freedom, each ``[...]``, one per map.

    An exact value has the standard error 0. Otherwise the error is never below half a rounding step of the
    inputs' type, which bounds what the products can resolve.
    """

    value: Tensor
    standard_error: Tensor
    degrees: Tensor

    def interval(self, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the range that covers the exact value with that confidence."""
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
        student = import_optional("scipy.stats", "a confidence interval").t
        quantiles = student.ppf((1 + confidence) / 2, self.degrees.cpu().numpy())
        reach = torch.as_tensor(quantiles).to(self.value) * self.standard_error
        return self.value - reach, self.value + reach

    @classmethod
    def joined(cls, parts: Sequence[Estimate], join: Callable[[list[Tensor]], Tensor]) -> Estimate:
        """Several estimates as one, by ``torch.cat`` or ``torch.stack``."""
        return cls(*(join(list(field)) for field in zip(*parts, strict=True)))


def exact_estimate(value: Tensor) -> Estimate:
    return Estimate(value, torch.zeros_like(value), torch.full_like(value, float("inf")))


def ratio_estimate(indirect: Tensor, direct: Tensor) -> Estimate:
    """``indirect / (direct + indirect)`` from independent unbiased pairs along the last dimension.

    The error is that of the linearised ratio, so fluctuations common to both norms cancel.
    """
    probes = indirect.shape[-1]
    total = (indirect + direct).mean(-1)
    share = indirect.mean(-1) / total
    residual = ((1 - share[..., None]) * indirect - share[..., None] * direct) / total[..., None]
    return Estimate(share, residual.std(-1) / probes**0.5, torch.full_like(share, probes - 1.0))


class Strata(NamedTuple):
    """A stratified sample: two rows from each of several stretches of a text, or all rows of a short one.

    positions ``[rows]``; weights and left ``[strata]`` (a stratum's share of the text, and the share of its
    rows that was not drawn) belong to consecutive pairs of positions. Without weights every row was taken.
    """

    positions: Tensor
    weights: Tensor | None = None
    left: Tensor | None = None

    def mean(self, values: Tensor) -> Estimate:
        """Mean over all rows of the text, from ``values [..., rows]`` at the drawn positions."""
        if self.weights is None or self.left is None:
            return exact_estimate(values.mean(-1))
        pairs = values.unflatten(-1, (-1, 2))
        mean = (self.weights * pairs.mean(-1)).sum(-1)
        variances = self.weights**2 * self.left * (pairs[..., 0] - pairs[..., 1]).square() / 4
        return Estimate(mean, variances.sum(-1).sqrt(), _degrees_of_freedom(variances))


def _degrees_of_freedom(variances: Tensor) -> Tensor:
    """Degrees of freedom of a sum of variances along the last dimension, each from one pair.

    Satterthwaite's rule, corrected for the bias of squared estimates with one degree of freedom each.
    """
    squares = variances.square().sum(-1)
    degrees = 3 * variances.sum(-1).square() / squares - 2
    return torch.where(squares > 0, degrees.clamp(1, variances.shape[-1]), float("inf"))


WHOLE_UP_TO = 4
"""Texts of up to so many times the rows to draw are taken whole: they cost little, and two rows of three or
four say too little about the others for an honest error bar."""


def draw_rows(tokens: int, rows: int, generator: torch.Generator, *, causal: bool = False) -> Strata:
    """Draw ``rows`` of a long text's rows by strata: neighbours resemble each other.

    In a causal map the first rows, which see little, change fastest; there the stretches grow linearly, which
    is the best allocation for a value that follows the logarithm of the position.
    """
    device = generator.device
    if tokens <= WHOLE_UP_TO * rows:
        return Strata(torch.arange(tokens, device=device))
    steps = torch.arange(rows // 2 + 1, device=device)
    edges = steps * tokens // (rows // 2)
    if causal:
        edges = torch.maximum(2 * steps, steps**2 * tokens // (rows // 2) ** 2)
    start, size = edges[:-1], edges.diff()
    draws = torch.rand(2, rows // 2, generator=generator, device=device)
    first = torch.minimum((draws[0] * size).long(), size - 1)
    second = torch.minimum((draws[1] * (size - 1)).long(), size - 2)
    second = second + (second >= first)
    positions = torch.stack([start + first, start + second], -1).flatten()
    return Strata(positions, size / tokens, 1 - 2 / size)


def balanced_signs(tokens: int, probes: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Random columns of +1 and -1 that sum to zero, ``[tokens, probes]``, and the scale of their squares.

    Attention maps the constant vector to itself, so that part of a norm is known without sampling; balanced
    signs are orthogonal to it: E[z z^T] * scale is the projection onto the rest. Odd lengths have one zero.
    """
    pattern = torch.zeros(tokens, 1, device=generator.device)
    pattern[: tokens // 2] = 1
    pattern[tokens // 2 : tokens // 2 * 2] = -1
    order = torch.rand(tokens, probes, generator=generator, device=generator.device).argsort(0)
    signs = torch.empty(tokens, probes, device=generator.device).scatter_(
        0, order, pattern.expand(-1, probes)
    )
    return signs, 1.0 if tokens % 2 else (tokens - 1) / tokens


SAMPLED = ("gtd", "indirect_entropy", "attention_entropy", "sink_mass")


@dataclass(frozen=True)
class Sampling:
    """How much is drawn: random signs for the norms, queries for the entropies, and the seed of both.

    Texts of up to four times ``rows`` tokens are not sampled for the entropies: all their rows are taken.
    With two more channels, for anchor and column sums, 62 fill a head size of 64.
    """

    probes: int = 62
    rows: int = 62
    seed: int = 0

    def __post_init__(self) -> None:
        if any(not isinstance(field, int) for field in (self.probes, self.rows, self.seed)):
            raise ValueError(f"probes, rows and seed must be whole numbers, not as in {self}")
        if self.probes < 2 or self.rows < 4:
            raise ValueError(
                f"sampling needs at least 2 probes and 4 rows, not {self.probes} and {self.rows}"
            )


def checked_sampling(sampling: Sampling | None) -> Sampling:
    """The given Sampling, or the usual one."""
    if not isinstance(sampling, Sampling | None):
        raise TypeError(
            f"sampling must be a saobp.metrics.Sampling, as in Sampling(probes=62), not {sampling!r}"
        )
    return Sampling() if sampling is None else sampling


class Draws(NamedTuple):
    """The random part of an estimate, drawn once for all heads of a text."""

    rows: Strata
    signs: Tensor
    signs_scale: float

    @classmethod
    def of(cls, tokens: int, sampling: Sampling, generator: torch.Generator, causal: bool) -> Draws:
        rows = draw_rows(tokens, sampling.rows, generator, causal=causal)
        return cls(rows, *balanced_signs(tokens, sampling.probes, generator))


def observe(
    operator: AttentionOperator,
    states: Tensor,
    names: Collection[str],
    beta: float,
    hops: int,
    draws: Draws,
) -> dict[str, Tensor]:
    """Raw observations of the operator's maps with these draws; states ``[heads, tokens, dim]``.

    Entropies of the drawn rows ``[heads, rows]``, squared norms of G z and A z ``[heads, 2, probes]``, sink
    mass ``[heads]``. ``estimate`` turns them into statistics, for all heads of a text at once.
    """
    heads, tokens, _ = states.shape
    precision = torch.promote_types(states.dtype, torch.float32)
    seen: dict[str, Tensor] = {}
    forward = backward = paths = direct = None
    if "gtd" in names:
        forward = draws.signs.to(states.dtype).expand(heads, -1, -1)
        norms = RunningNorms(draws.signs_scale, beta, hops)
    if "attention_entropy" in names or "indirect_entropy" in names:
        direct = operator.rows(draws.rows.positions)
        if "attention_entropy" in names:
            seen["attention_entropy"] = torch.special.entr(direct).sum(-1)
    followed = len(draws.rows.positions) if "indirect_entropy" in names else 0
    if followed or "sink_mass" in names:
        backward = states.new_ones(heads, tokens, followed + ("sink_mass" in names))
        if direct is not None:
            backward[..., :followed] = direct.transpose(-1, -2)[..., :followed]
    del direct

    for hop in range(1, hops + 1):
        if hop == hops:
            backward = None
        if forward is None and backward is None:
            break
        forward, backward = operator.sweep(forward, backward)
        if hop == 1 and backward is not None and "sink_mass" in names:
            seen["sink_mass"] = backward[..., -1].to(precision).amax(-1) / tokens
            backward = backward[..., :followed] if followed else None
        if forward is not None:
            norms.add(hop, forward)
        if backward is not None and paths is None:
            paths = backward.to(precision, copy=True)
        elif backward is not None and paths is not None:
            paths.add_(backward, alpha=beta ** (hop - 1))
    del forward, backward
    if "gtd" in names:
        seen["gtd"] = norms.found()
    if paths is not None:
        paths.div_(paths.sum(-2, keepdim=True).clamp_(min=torch.finfo(precision).tiny))
        seen["indirect_entropy"] = torch.special.entr(paths).sum(-2)
    return seen


def estimate(name: str, seen: Tensor, draws: Draws, dtype: torch.dtype) -> Estimate:
    """The statistic ``[heads]`` from its observations with states of the given type.

    Its error is no smaller than what that type and long sums can resolve.
    """
    if name == "gtd":
        result = ratio_estimate(*seen.unbind(1))
    elif name == "sink_mass":
        result = exact_estimate(seen)
    else:
        result = draws.rows.mean(seen)
    summed = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * len(draws.signs) ** 0.5
    rounding = (torch.finfo(dtype).eps / 2 + summed) * result.value.abs().clamp(max=1)
    return result._replace(standard_error=torch.hypot(result.standard_error, rounding))


class RunningNorms:
    """Squared norms of A z and G z per probe, as powers of A are applied to the probes one by one."""

    def __init__(self, scale: float, beta: float, hops: int) -> None:
        self.scale, self.beta = scale, beta
        self.constant = sum(beta ** (hop - 1) for hop in range(2, hops + 1)) ** 2
        self.direct: Tensor | None = None
        self.paths: Tensor | None = None

    def add(self, hop: int, states: Tensor) -> None:
        """states ``[heads, tokens, probes]`` are A^hop z; paths add up to G z over beta."""
        precision = torch.promote_types(states.dtype, torch.float32)
        if hop == 1:
            self.direct = _squared_norms(states, precision)
        elif self.paths is None:
            self.paths = states.to(precision, copy=True)
        else:
            self.paths.add_(states, alpha=self.beta ** (hop - 2))

    def found(self) -> Tensor:
        """Squared norms of G z and A z, ``[heads, 2, probes]``; overwrites the paths.

        The constant vector's part, a power sum for G and 1 for A, is exact.
        """
        assert self.direct is not None
        assert self.paths is not None
        paths, self.paths = self.paths, None
        indirect = _squared_norms(paths, paths.dtype) * (self.scale * self.beta**2) + self.constant
        return torch.stack([indirect, self.scale * self.direct + 1], 1)


def _squared_norms(states: Tensor, precision: torch.dtype) -> Tensor:
    """Of the columns, ``[heads, tokens, probes]`` to ``[heads, probes]``, without a copy of the states."""
    return torch.linalg.vector_norm(states, dim=-2, dtype=precision).square_()

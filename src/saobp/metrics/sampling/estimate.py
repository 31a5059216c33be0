"""A value with its standard error, and its two estimators: a ratio of norms and a stratified mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saobp.extras import import_optional


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


def draw_rows(tokens: int, rows: int, generator: torch.Generator, *, causal: bool = False) -> Strata:
    """Draw ``rows`` of a text's rows by strata: neighbours resemble each other.

    In a causal map the first rows, which see little, change fastest; there the stretches grow linearly, which
    is the best allocation for a value that follows the logarithm of the position.
    """
    device = generator.device
    if tokens <= rows:
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

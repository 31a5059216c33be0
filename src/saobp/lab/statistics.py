"""Paired comparisons over seeds; the one definition of a gain."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
POWER = 0.8
LEAST_PAIRS = 3
"""With fewer, a comparison is inconclusive."""
MOST_PAIRS = 10_000

Verdict = Literal["gain", "loss", "no gain", "undecided"]


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; no deviation for one seed."""

    mean: float
    deviation: float | None
    seeds: int


def spread(values: Iterable[float]) -> Spread | None:
    """None for no values."""
    numbers = list(values)
    if not numbers:
        return None
    deviation = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
    return Spread(float(np.mean(numbers)), deviation, len(numbers))


@dataclass(frozen=True)
class Chance:
    """How far scores of one model vary over seeds.

    deviation: standard deviation over seeds, pooled over models
    low, high: 95 % interval of it, for normal scores
    apart:     two runs of one model with different seeds are no further apart in 95 % of cases
    """

    deviation: float
    low: float
    high: float
    apart: float


def chance(models: Iterable[Iterable[float]]) -> Chance | None:
    """From the scores of each model, one for each seed; None where no model has two."""
    groups = [list(scores) for scores in models]
    freedom = sum(len(scores) - 1 for scores in groups if len(scores) > 1)
    if freedom < 1:
        return None
    squares = math.fsum(float(np.var(scores, ddof=1)) * (len(scores) - 1) for scores in groups if scores[1:])
    deviation = math.sqrt(squares / freedom)
    ends = [math.sqrt(squares / stats.chi2.ppf(0.5 + side * CONFIDENCE / 2, freedom)) for side in (1, -1)]
    beyond = float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom))
    return Chance(deviation, float(ends[0]), float(ends[1]), beyond * math.sqrt(2) * deviation)


@dataclass(frozen=True)
class Gain:
    """Paired difference between two methods over seeds.

    difference: mean of the paired differences, method minus base
    low, high:  95 % t interval of that mean; None with a single pair
    """

    difference: float
    low: float | None
    high: float | None
    pairs: int
    verdict: Verdict


def paired_gain(
    method: Mapping[int, float],
    base: Mapping[int, float],
    *,
    higher_is_better: bool = True,
    least_pairs: int = LEAST_PAIRS,
) -> Gain | None:
    """Compare on common seeds; None if there are none.

    A gain or loss is one whose interval excludes zero. With fewer than ``least_pairs`` it is inconclusive.
    """
    seeds = sorted(set(method) & set(base))
    if not seeds:
        return None
    method_values, base_values = [method[seed] for seed in seeds], [base[seed] for seed in seeds]
    count, mean = len(seeds), float(np.mean(np.subtract(method_values, base_values)))
    if count == 1:
        return Gain(mean, None, None, 1, "undecided")
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # for equal differences
        interval = stats.ttest_rel(method_values, base_values).confidence_interval(CONFIDENCE)
    low, high = float(interval.low), float(interval.high)
    return Gain(
        mean, low, high, count, _verdict(low, high, higher_is_better) if count >= least_pairs else "undecided"
    )


def _verdict(low: float, high: float, higher_is_better: bool) -> Verdict:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "undecided"
    if low <= 0 <= high:
        return "no gain"
    return "gain" if (low > 0) == higher_is_better else "loss"


def pairs_needed(deviation: float, effect: float) -> int | None:
    """Sample size of a paired t test at 5 % for an effect, at a power of 80 %; None beyond ``MOST_PAIRS``.

    deviation: standard deviation of the paired differences, in the unit of the effect
    """
    if not deviation > 0 or effect == 0:
        raise ValueError(f"power needs a spread above 0 and an effect, not {deviation} and {effect}")
    ratio = min(abs(effect) / deviation, 30.0)  # two pairs are enough, and the distribution overflows
    for pairs in range(2, MOST_PAIRS + 1):
        beyond = float(stats.t.ppf(0.5 + CONFIDENCE / 2, pairs - 1))
        if stats.nct.sf(beyond, pairs - 1, ratio * math.sqrt(pairs)) >= POWER:
            return max(pairs, LEAST_PAIRS)
    return None


Status = Literal["reproduces", "does not reproduce", "not shown", "could not be decided", "not run"]
UNDECIDED: Status = "could not be decided"


def claim_status(paper: float, gain: Gain | None, *, same_size: bool = True) -> Status:
    """Whether a difference that the paper reports reproduces.

    It does if the interval excludes zero with the same sign, and does not with the opposite sign. An interval
    that contains zero refutes the paper's difference only if it excludes that; else it is inconclusive.
    Without ``same_size`` only the sign is compared, as between different training sets.

    paper: its difference, method minus base
    """
    if gain is None:
        return "not run"
    if gain.verdict == "undecided" or gain.low is None or gain.high is None:
        return UNDECIDED
    if gain.verdict == "no gain":
        refuted = same_size and not gain.low <= paper <= gain.high
        return "does not reproduce" if refuted else UNDECIDED
    return "reproduces" if gain.difference * paper > 0 else "does not reproduce"


def as_percent(gain: Gain) -> Gain:
    """Differences of losses in nats as per cent of perplexity."""
    low, high = (None if end is None else 100 * math.expm1(end) for end in (gain.low, gain.high))
    return Gain(100 * math.expm1(gain.difference), low, high, gain.pairs, gain.verdict)


def answer_status(gain: Gain | None) -> Status:
    """Answer to whether something is better: yes only for a significant gain."""
    if gain is None:
        return "not run"
    verdicts: dict[Verdict, Status] = {
        "gain": "reproduces",
        "loss": "does not reproduce",
        "no gain": "not shown",
        "undecided": UNDECIDED,
    }
    return verdicts[gain.verdict]

"""Paired comparisons over seeds: what is called a gain is decided here alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
LEAST_PAIRS = 3
"""With fewer, a difference decides nothing."""

Verdict = Literal["gain", "loss", "no gain", "undecided"]


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; the deviation of one seed is not known."""

    mean: float
    deviation: float | None
    seeds: int


def spread(values: Iterable[float]) -> Spread | None:
    """Of nothing, None."""
    found = list(values)
    if not found:
        return None
    deviation = float(np.std(found, ddof=1)) if len(found) > 1 else None
    return Spread(float(np.mean(found)), deviation, len(found))


@dataclass(frozen=True)
class Gain:
    """How much better a method is than another, in pairs of the same seed.

    difference: mean of the paired differences, method less base
    low, high:  95 % t interval of that mean; None with a single pair
    """

    difference: float
    low: float | None
    high: float | None
    pairs: int
    verdict: Verdict


def paired_gain(
    method: Mapping[int, float], base: Mapping[int, float], *, higher_is_better: bool = True
) -> Gain | None:
    """Compare by seeds that both have; None where there is none.

    A gain or loss is one whose interval leaves zero out. A difference within the spread is no gain. With
    fewer than three pairs nothing is decided.
    """
    seeds = sorted(set(method) & set(base))
    if not seeds:
        return None
    own, other = [method[seed] for seed in seeds], [base[seed] for seed in seeds]
    count, mean = len(seeds), float(np.mean(np.subtract(own, other)))
    if count == 1:
        return Gain(mean, None, None, 1, "undecided")
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # on equal differences
        interval = stats.ttest_rel(own, other).confidence_interval(CONFIDENCE)
    low, high = float(interval.low), float(interval.high)
    return Gain(mean, low, high, count, _verdict(low, high, count, higher_is_better))


def _verdict(low: float, high: float, pairs: int, higher_is_better: bool) -> Verdict:
    if not (math.isfinite(low) and math.isfinite(high)) or pairs < LEAST_PAIRS:
        return "undecided"
    if low <= 0 <= high:
        return "no gain"
    return "gain" if (low > 0) == higher_is_better else "loss"


def pairs_needed(deviation: float, effect: float, power: float = 0.8) -> int:
    """Paired seeds after which a t test at 5 % sees an effect with that probability.

    deviation: standard deviation of the paired differences, in the unit of the effect
    """
    if not deviation > 0 or effect == 0:
        raise ValueError(f"power needs a spread above 0 and an effect, not {deviation} and {effect}")
    ratio = min(abs(effect) / deviation, 30.0)  # beyond, two pairs are enough, and the distribution overflows
    for pairs in range(2, 10_000):
        beyond = float(stats.t.ppf(0.5 + CONFIDENCE / 2, pairs - 1))
        if stats.nct.sf(beyond, pairs - 1, ratio * math.sqrt(pairs)) >= power:
            return max(pairs, LEAST_PAIRS)
    raise ValueError(f"an effect of {effect} needs more than 10,000 pairs at a spread of {deviation}")


Status = Literal["reproduces", "does not reproduce", "not shown", "could not be decided", "not run"]
UNDECIDED: Status = "could not be decided"


def claim_status(paper: float, gain: Gain | None, *, same_size: bool = True) -> Status:
    """Whether a difference that the paper reports is seen here too.

    It is if the interval leaves zero out on its side, and is not if the interval lies on the other side. An
    interval that holds zero refutes the paper's difference only if it leaves that out; else three seeds are
    too few to tell. Without ``same_size`` only the side compares, as between training sets that differ.

    paper: its difference, method less base
    """
    if gain is None:
        return "not run"
    if gain.verdict == "undecided" or gain.low is None or gain.high is None:
        return UNDECIDED
    if gain.verdict == "no gain":
        refuted = same_size and not gain.low <= paper <= gain.high
        return "does not reproduce" if refuted else UNDECIDED
    return "reproduces" if gain.difference * paper > 0 else "does not reproduce"


def answer_status(gain: Gain | None) -> Status:
    """Whether something is better, for a question: only a gain is; one within the spread is not shown."""
    if gain is None:
        return "not run"
    verdicts: dict[Verdict, Status] = {
        "gain": "reproduces",
        "loss": "does not reproduce",
        "no gain": "not shown",
        "undecided": UNDECIDED,
    }
    return verdicts[gain.verdict]

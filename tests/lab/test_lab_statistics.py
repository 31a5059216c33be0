"""What is called a gain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from saobp.lab.statistics import answer_status, chance, claim_status, paired_gain, pairs_needed, spread

NUMBERS = st.floats(-1e3, 1e3).map(lambda x: round(x, 3))


def test_a_difference_within_the_spread_is_no_gain() -> None:
    method, base = {42: 10.0, 1: 12.0, 2: 8.0}, {42: 9.8, 1: 12.4, 2: 8.1}
    gain = paired_gain(method, base)
    assert gain is not None
    assert gain.verdict == "no gain"
    assert gain.difference == pytest.approx(-0.1)


def test_pairs_see_what_means_hide() -> None:
    """Seeds differ by far more than methods do, but the method is better in every pair."""
    base = {42: 10.0, 1: 20.0, 2: 30.0}
    method = {42: 9.0, 1: 18.9, 2: 29.1}
    lower = paired_gain(method, base, higher_is_better=False)
    higher = paired_gain(method, base)
    assert lower is not None
    assert higher is not None
    assert (lower.verdict, higher.verdict) == ("gain", "loss")


def test_the_interval_is_student_s() -> None:
    gain = paired_gain({1: 1.0, 2: 2.0, 3: 3.0}, {1: 0.0, 2: 0.0, 3: 0.0})
    assert gain is not None
    assert gain.low is not None
    assert gain.high is not None
    reach = 4.302653 / math.sqrt(3)
    assert (gain.low, gain.high) == pytest.approx((2 - reach, 2 + reach), abs=1e-5)


def test_only_seeds_that_both_have_are_pairs() -> None:
    gain = paired_gain({42: 1.0, 1: 5.0, 7: 100.0}, {42: 0.0, 1: 4.0, 8: -100.0})
    assert gain is not None
    assert (gain.pairs, gain.difference) == (2, 1.0)
    assert paired_gain({1: 0.0}, {2: 0.0}) is None


@pytest.mark.parametrize("pairs", [1, 2])
def test_fewer_than_three_pairs_decide_nothing(pairs: int) -> None:
    seeds = range(pairs)
    gain = paired_gain(dict.fromkeys(seeds, 100.0), dict.fromkeys(seeds, 0.0))
    assert gain is not None
    assert gain.verdict == "undecided"


def test_numbers_that_are_none_decide_nothing() -> None:
    gain = paired_gain({1: math.nan, 2: 1.0, 3: 1.0}, {1: 0.0, 2: 0.0, 3: 0.0})
    assert gain is not None
    assert gain.verdict == "undecided"


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=6))
def test_turning_the_comparison_round_turns_the_verdict(pairs: list[tuple[float, float]]) -> None:
    method, base = ({seed: pair[side] for seed, pair in enumerate(pairs)} for side in (0, 1))
    one, other = paired_gain(method, base), paired_gain(base, method)
    assert one is not None
    assert other is not None
    assert {"gain": "loss", "loss": "gain"}.get(one.verdict, one.verdict) == other.verdict


def test_claims() -> None:
    better = paired_gain({1: 1.0, 2: 1.1, 3: 1.0}, {1: 0.0, 2: 0.0, 3: 0.0})
    same = paired_gain({1: 1.0, 2: -1.0, 3: 0.1}, {1: 0.0, 2: 0.0, 3: 0.0})
    one = paired_gain({1: 1.0}, {1: 0.0})
    assert claim_status(0.5, better) == "reproduces"
    assert claim_status(-0.5, better) == "does not reproduce"
    lower = paired_gain({1: 1.0, 2: 1.1, 3: 1.0}, {1: 0.0, 2: 0.0, 3: 0.0}, higher_is_better=False)
    assert claim_status(0.5, lower) == "reproduces"
    assert claim_status(0.5, same) == "could not be decided"
    assert claim_status(9.0, same) == "does not reproduce"
    assert claim_status(9.0, same, same_size=False) == "could not be decided"
    assert claim_status(0.0, same) == "could not be decided"
    assert claim_status(0.0, better) == "does not reproduce"
    assert claim_status(0.5, one) == "could not be decided"
    assert claim_status(0.5, None) == "not run"


def test_a_question_is_answered_by_yes_only_for_a_gain() -> None:
    base = {1: 0.0, 2: 0.0, 3: 0.0}
    lower = paired_gain({1: -1.0, 2: -1.1, 3: -1.0}, base, higher_is_better=False)
    same = paired_gain({1: 1.0, 2: -1.0, 3: 0.1}, base)
    assert answer_status(lower) == "reproduces"
    assert answer_status(same) == "not shown"
    assert answer_status(paired_gain({1: 1.0}, base)) == "could not be decided"
    assert answer_status(None) == "not run"


def test_the_spread_of_one_seed_is_not_known() -> None:
    assert spread([]) is None
    one, three = spread([2.0]), spread([1.0, 2.0, 3.0])
    assert one is not None
    assert three is not None
    assert (one.mean, one.deviation, one.seeds) == (2.0, None, 1)
    assert (three.mean, three.deviation) == (2.0, 1.0)


def test_chance_holds_two_runs_of_one_model_in_95_of_100_cases() -> None:
    """Five seeds of two models with different means; then two further runs of one of them."""
    draw = np.random.default_rng(0)
    inside, trials = 0, 4000
    for _ in range(trials):
        found = chance([draw.normal(50.0, 2.0, 5), draw.normal(70.0, 2.0, 5)])
        assert found is not None
        inside += abs(float(np.subtract(*draw.normal(0.0, 2.0, 2)))) <= found.apart
    assert inside / trials == pytest.approx(0.95, abs=0.015)


def test_chance_needs_two_seeds_of_a_model() -> None:
    assert chance([[1.0], [2.0], []]) is None
    found = chance([[1.0, 3.0], [7.0]])
    assert found is not None
    assert found.deviation == pytest.approx(math.sqrt(2))
    assert found.low < found.deviation < found.high


def test_three_pairs_are_needed_at_least_however_small_the_spread() -> None:
    assert pairs_needed(1e-16, 0.5) == 3


@pytest.mark.parametrize(("deviation", "effect"), [(0.5, 0.5), (0.8, 0.5), (0.3, 0.4)])
def test_so_many_pairs_find_the_effect_four_times_in_five(deviation: float, effect: float) -> None:
    pairs = pairs_needed(deviation, effect)
    assert pairs is not None
    drawn = np.random.default_rng(0).normal(effect, deviation, (20_000, pairs))
    found = stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05
    assert 0.79 < found.mean() < 0.93
    fewer = stats.ttest_1samp(drawn[:, : pairs - 1], 0, axis=1).pvalue < 0.05
    assert fewer.mean() < 0.81

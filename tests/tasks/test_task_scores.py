"""Metrics against values worked out by hand."""

import math

import numpy as np
import pytest

from saobp.training.finetune.predict import plain, score, span_scores, token_f1


def test_class_metrics():
    labels, guesses = np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0])
    found = score(("accuracy", "f1", "matthews"), guesses, labels)
    assert found["accuracy"] == 75
    assert found["f1"] == pytest.approx(100 * 2 / 3)
    assert found["matthews"] == pytest.approx(100 * 2 / math.sqrt(12))


def test_one_guess_for_all_rows_has_no_correlation():
    labels = np.array([1, 1, 0])
    assert score(("matthews",), np.ones(3, int), labels)["matthews"] == 0
    assert score(("spearman", "pearson"), np.ones(3), labels) == {"spearman": 0, "pearson": 0}


def test_correlations():
    labels, guesses = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 40.0])
    found = score(("spearman", "pearson"), guesses, labels)
    assert found["spearman"] == pytest.approx(100 * (1 - 6 * 2 / (4 * 15)))
    centred = guesses - guesses.mean()
    spread = math.sqrt((centred**2).sum() * 5.0)
    assert found["pearson"] == pytest.approx(100 * float((centred * (labels - 2.5)).sum()) / spread)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The  Cat's, an end.", "cats end"), ("A theatre", "theatre"), ("the", ""), ("“Ünder”", "“ünder”")],
)
def test_answers_are_compared_without_case_articles_and_punctuation(text, expected):
    assert plain(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("the red house", "Red House!", 1.0),
        ("red house", "house", 2 / 3),
        ("red red house", "red house house", 2 * 2 / 6),
        ("blue", "red", 0.0),
        ("", "red", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_f1_of_words(prediction, answer, expected):
    assert token_f1(prediction, answer) == pytest.approx(expected)


def test_the_best_accepted_answer_counts():
    found = span_scores(["red house", "nine"], [["house", "the red house"], ["9", "nine men"]])
    assert found == {"f1": pytest.approx(100 * (1 + 2 / 3) / 2), "exact_match": 50}


def test_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match="unknown metric 'bleu'"):
        score(("bleu",), np.ones(2), np.ones(2))

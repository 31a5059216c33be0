"""Each task's metrics, in percent."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy import stats
from sklearn import metrics

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The named metrics of predicted classes or numbers against labels, both ``[rows]``."""
    return {name: 100.0 * _one(name, predictions, labels) for name in names}


def _one(name: str, predictions: np.ndarray, labels: np.ndarray) -> float:
    if name == "accuracy":
        return float(metrics.accuracy_score(labels, predictions))
    if name == "f1":
        return float(metrics.f1_score(labels, predictions, zero_division=0))
    if name == "matthews":
        return float(metrics.matthews_corrcoef(labels, predictions))
    if name in ("spearman", "pearson"):
        if len(labels) < 2 or np.ptp(predictions) == 0 or np.ptp(labels) == 0:
            return 0.0
        correlation = stats.spearmanr if name == "spearman" else stats.pearsonr
        return float(correlation(predictions, labels)[0])
    raise ValueError(f"unknown metric {name!r}")


def span_scores(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """SQuAD's F1 and exact match: the best over the accepted answers, averaged over questions."""
    pairs = list(zip(predictions, answers, strict=True))
    f1 = [max(token_f1(prediction, answer) for answer in accepted) for prediction, accepted in pairs]
    exact = [max(plain(prediction) == plain(answer) for answer in accepted) for prediction, accepted in pairs]
    return {"f1": 100.0 * float(np.mean(f1)), "exact_match": 100.0 * float(np.mean(exact))}


def plain(text: str) -> str:
    """An answer as SQuAD compares it: lower case, without punctuation, articles and doubled spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of two answers."""
    words, expected = plain(prediction).split(), plain(answer).split()
    common = sum((Counter(words) & Counter(expected)).values())
    if common == 0:
        return 0.0
    return 2 * common / (len(words) + len(expected))

"""How closely a statistic follows a task score over the checkpoints of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from saobp.extras import import_optional


class Correlation(NamedTuple):
    """Pearson's r, the two-sided p of its being zero, and the number of checkpoints."""

    r: float
    p: float
    checkpoints: int


def pearson(values: Sequence[float], scores: Sequence[float]) -> Correlation:
    """Pearson correlation of two series over checkpoints, of which there must be at least three."""
    if len(values) != len(scores):
        raise ValueError(
            f"there are {len(values)} values but {len(scores)} scores: give one of each per checkpoint"
        )
    if len(values) < 3:
        raise ValueError(f"a correlation needs at least three checkpoints, not {len(values)}")
    for name, series in (("values", values), ("scores", scores)):
        if not all(math.isfinite(number) for number in series):
            raise ValueError(f"the {name} hold NaN or infinite numbers")
        if max(series) == min(series):
            raise ValueError(f"the {name} are the same at every checkpoint, so nothing can follow them")
    result = import_optional("scipy.stats", "a correlation").pearsonr(values, scores)
    return Correlation(float(result.statistic), float(result.pvalue), len(values))


def correlations(
    checkpoints: Sequence[Mapping[str, float]],
    score: str,
    statistics: Collection[str] = ("gtd", "cross_layer_gtd"),
) -> dict[str, Correlation]:
    """Pearson correlation of each statistic with the score, from one record of numbers per checkpoint.

    The defaults compare single-layer with cross-layer GTD, as the paper does; records come from
    ``health_metrics`` or anywhere else, as long as they name the score and the statistics.
    """
    for index, record in enumerate(checkpoints):
        missing = [name for name in (score, *statistics) if name not in record]
        if missing:
            raise ValueError(f"checkpoint {index} has no {', '.join(missing)}: it has {', '.join(record)}")
    scores = [record[score] for record in checkpoints]
    return {name: pearson([record[name] for record in checkpoints], scores) for name in statistics}

"""Helpers shared by the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import stats

from saobp.lab.experiment_plan import PretrainRun
from saobp.lab.result_page import Page
from saobp.lab.results import Results, Values
from saobp.lab.statistics import claim_status, paired_gain
from saobp.metrics.functional.correlation import pearson
from saobp.metrics.health.head_health import CROSS_LAYER

SPREAD = (
    "Ours: mean ± standard deviation (seeds). 'method - base' is the mean difference between runs of the "
    "same seed and the same order of texts, with a 95 % t interval; the base is Original unless said "
    "otherwise. ↑ marks measures of which more is better, ↓ those of which less is. A difference whose "
    "interval holds zero is called no gain, and fewer than three pairs decide nothing, however "
    "clear their interval."
)
BUDGET = (
    "Our texts and fine-tuning are not the paper's, and its number of tokens is not known, so absolute "
    "numbers compare only roughly; differences from Original are what compares. The paper's numbers "
    f"are of a single seed, so how far its own would vary is not known. {SPREAD}"
)
PLATEAU_END = 5.5
"""Loss in nats that ends the plateau: below unigram entropy, far above final losses."""


def mean_score(results: Results, model: PretrainRun, tasks: Sequence[str]) -> float | None:
    """Mean over tasks, for a model that has all of them."""
    scores = [results.score(model, task) for task in tasks]
    known = [score for score in scores if score is not None]
    return float(np.mean(known)) if known and len(known) == len(scores) else None


def mean_of(results: Results, measure: str, statistic: str) -> Values:
    """Mean of a statistic over all layers and heads, for each model that was measured."""
    return results.measured_values(measure, lambda taken: float(np.mean(taken["layers"][statistic])))


def deepest_mean_of(results: Results, measure: str, statistic: str) -> Values:
    """Mean of a statistic over the heads of the last layer, for each model that was measured."""
    return results.measured_values(measure, lambda taken: float(np.mean(taken["layers"][statistic][-1])))


def by_layer(results: Results, measure: str, statistic: str) -> dict[str, list[list[float]]]:
    """Mean over heads of each layer: method to one curve per seed."""
    grids = _grids(results, measure, statistic)
    return {
        key: [[float(np.mean(heads)) for heads in grid] for grid in seeds] for key, seeds in grids.items()
    }


def last_layer_by_head(results: Results, measure: str, statistic: str) -> dict[str, list[list[float]]]:
    """The last layer's heads: method to one curve per seed."""
    return {
        key: [list(grid[-1]) for grid in seeds] for key, seeds in _grids(results, measure, statistic).items()
    }


def _grids(results: Results, measure: str, statistic: str) -> dict[str, list[list[list[float]]]]:
    """A statistic by layer and head: method to one grid per seed."""
    found: dict[str, list[list[list[float]]]] = {}
    for model in results.models():
        taken = results.measured(model, measure)
        if taken is not None:
            with results.reading(model):
                grid = [[float(value) for value in heads] for heads in taken["layers"][statistic]]
            found.setdefault(model.method.key, []).append(grid)
    return found


def checkpoints(results: Results, model: PretrainRun) -> list[dict[str, float]]:
    """Evaluations of a pretraining run with the GTD of the same step: perplexity, gtd, cross-layer GTD."""
    health = results.run(model).health()
    with results.reading(model):
        losses = dict(held_out(results, model))
        return [{"score": losses[line["step"]], **_gtd(line)} for line in health if line["step"] in losses]


def held_out(results: Results, model: PretrainRun) -> list[tuple[int, float]]:
    """Steps of a pretraining run at which it was evaluated, with the perplexity."""
    lines = results.run(model).metrics()
    with results.reading(model):
        return [(line["step"], float(line["eval_perplexity"])) for line in lines if "eval_perplexity" in line]


def held_out_curves(results: Results) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Millions of tokens and held-out perplexity, by method and seed."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for model in results.models():
        per_step = model.recipe.tokens_per_step / 1e6
        curve = [(step * per_step, perplexity) for step, perplexity in held_out(results, model)]
        found.setdefault(model.method.key, {})[model.seed] = curve
    return found


def epochs(results: Results, model: PretrainRun, task: str) -> list[dict[str, float]]:
    """Epochs of a fine-tuning run with their GTD."""
    metric = (results.finetuned(model, task) or {}).get("metric", "accuracy")
    with results.reading(model):
        return [
            {"score": float(line[f"eval_{metric}"]), **_gtd(health)}
            for line, health in results.epochs(model, task)
            if f"eval_{metric}" in line
        ]


def score_points(results: Results, model: PretrainRun, score: str) -> list[dict[str, float]]:
    """Checkpoints of a run for perplexity, epochs of its fine-tuning for a task."""
    return checkpoints(results, model) if score.endswith("perplexity") else epochs(results, model, score)


def _gtd(health: Mapping[str, Any]) -> dict[str, float]:
    found = {"gtd": float(np.mean(health["statistics"]["gtd"]))}
    across = health.get(CROSS_LAYER)
    if isinstance(across, list) and across:
        found[CROSS_LAYER] = float(np.mean(across))
    return found


def format_correlation(points: Sequence[Mapping[str, float]], statistic: str) -> str:
    """``-0.91 (p = 0.012, 16 points)``, or the reason for none."""
    pairs = [(point[statistic], point["score"]) for point in points if statistic in point]
    try:
        correlation = pearson([x for x, _ in pairs], [y for _, y in pairs])
    except ValueError:
        return f"none ({len(pairs)} points)"
    chance = "p < 0.001" if correlation.p < 0.001 else f"p = {correlation.p:.2g}"
    return f"{correlation.r:+.2f} ({chance}, {correlation.checkpoints:,} points)"


def correlation_of(points: Sequence[Mapping[str, float]], statistic: str) -> float | None:
    """Pearson's r over the points of one run, where there is one."""
    pairs = [(point[statistic], point["score"]) for point in points if statistic in point]
    try:
        return pearson([x for x, _ in pairs], [y for _, y in pairs]).r
    except ValueError:
        return None


def by_seed(by_method: Mapping[PretrainRun, float | None]) -> dict[int, float]:
    """Mean over the methods of each seed, whose runs share texts and initial weights."""
    seeds: dict[int, list[float]] = {}
    for model, value in by_method.items():
        if value is not None:
            seeds.setdefault(model.seed, []).append(value)
    return {seed: float(np.mean(values)) for seed, values in seeds.items()}


def claim_correlation(
    page: Page, words: str, paper: float, by_method: Mapping[PretrainRun, float | None]
) -> None:
    """A claim about the sign of a correlation within runs, decided over seeds."""
    values = by_seed(by_method)
    gain = paired_gain(values, dict.fromkeys(values, 0.0))
    if gain is not None and gain.low is not None and gain.high is not None:
        gain = replace(gain, low=max(gain.low, -1.0), high=min(gain.high, 1.0))
    status = claim_status(paper, gain, same_size=False)
    page.claim(f"{words}: the paper has r = {paper:+.2f}", status, gain, detail="mean r")


def plateau_correlation(waiting: Values, ends: Values) -> str:
    """Rank correlation of plateau length and final value, over all runs that have both."""
    pairs = [
        (wait, ends[key][seed])
        for key, lengths in waiting.items()
        for seed, wait in lengths.items()
        if seed in ends.get(key, {})
    ]
    if len(pairs) < 3:
        return f"{len(pairs)} runs are too few to say"
    if any(len(set(column)) == 1 for column in zip(*pairs, strict=True)):
        return f"{len(pairs)} runs that do not differ in both say nothing"
    correlation = stats.spearmanr(*zip(*pairs, strict=True))
    return f"Spearman's rank correlation is {correlation.statistic:+.2f} over {len(pairs)} runs"

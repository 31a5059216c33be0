"""The page of the plateau: how long runs stay where the order of words is of no use, by batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from saobp.lab.figures import LoggedRun
from saobp.lab.figures import plateau as plateau_figure
from saobp.lab.methods import METHODS
from saobp.lab.result_page import Page, gain_in_words
from saobp.lab.results import Results
from saobp.lab.statistics import Gain, paired_gain

PLATEAU_END = 5.5
"""Held-out loss in nats below which a run has left the plateau, as in the page of pretraining."""
COUNTED = {"counting how frequent words are": 612.0, "also the other words of the row": 427.0}
"""Perplexities without the order of words, from counting (``results/plateau/without-order.md``)."""
HIGHEST_DRAWN = 2000.0
"""Perplexities above it, which are those of the first steps, are not drawn."""


def plateau(results: Results, page: Page) -> None:
    """Figure, table of runs, and each method against Original."""
    runs = logged_runs(results)
    if not runs:
        page.text("Not run: no run has a held-out loss yet.")
        return
    level = math.exp(PLATEAU_END)
    page.text(
        "Every run first learns what needs no word order: word frequencies, and which words occur in the "
        "same row ([what counting gives](without-order.md), a perplexity of 427 ± 10). A run counts as "
        "having left this plateau, because attention uses word order, from its first evaluation with a "
        f"held-out loss below {PLATEAU_END} (perplexity {level:.0f}) on. Rate, warm-up, schedule and steps "
        "are the paper's; its batch size is not printed, and its texts are not available: Wikipedia, books "
        "and reviews stand in."
    )
    page.figure(
        "plateau",
        plateau_figure(
            {title: [run._replace(points=_drawn(run.points)) for run in own] for title, own in runs.items()},
            level,
            COUNTED if results.plan.scale.recipe == "paper" else None,
        ),
        "Held-out perplexity, a line per run, a column per batch size; lines that coincide show as dashes of "
        "both colours. Thin lines: what counting gives, without any order of words. Dotted: perplexity "
        f"{level:.0f}. A cross: the run stopped before the end of its schedule.",
    )
    page.table(
        ("batch", "run", "steps", "million tokens", "perplexity there", "left the plateau at"),
        [row for title, own in runs.items() for row in _rows(title, own)],
    )
    for title, own in runs.items():
        _compare(page, title, own)
    page.text(
        "Differences are between runs of the same seed and the same order of texts, with a 95 % t interval "
        "over pairs. Fewer than three pairs decide nothing. Steps until a run leaves are compared where both "
        "runs of a pair did; perplexities at the last step that both have."
    )


def logged_runs(results: Results) -> dict[str, list[LoggedRun]]:
    """Runs with held-out losses, by batch size in words."""
    found: dict[str, list[LoggedRun]] = {}
    for model in results.models():
        recipe = model.recipe
        lines = results.run(model).metrics()
        points = [(line["step"], line["eval_perplexity"]) for line in lines if "eval_perplexity" in line]
        if points:
            whole = points[-1][0] >= recipe.steps
            own = LoggedRun(model.method.key, model.seed, recipe.tokens_per_step, points, whole)
            found.setdefault(f"{recipe.batch_size} x {recipe.length} tokens", []).append(own)
    return found


def left_at(run: LoggedRun) -> float | None:
    """The first evaluated step below the plateau, if any."""
    return next((step for step, perplexity in run.points if perplexity < math.exp(PLATEAU_END)), None)


def _drawn(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [point for point in points if point[1] <= HIGHEST_DRAWN] or [*points]


def _rows(title: str, runs: Sequence[LoggedRun]) -> list[list[str]]:
    rows = []
    for run in runs:
        step, perplexity = run.points[-1]
        left = left_at(run)
        tokens = run.tokens_per_step / 1e6
        at = "not" if left is None else f"step {left:,.0f}, {left * tokens:,.0f} million tokens"
        stopped = "" if run.is_whole else " (stopped)"
        name = f"{METHODS[run.method].title}, seed {run.seed}"
        rows.append([title, name, f"{step:,.0f}{stopped}", f"{step * tokens:,.0f}", f"{perplexity:.1f}", at])
    return rows


def _compare(page: Page, title: str, runs: Sequence[LoggedRun]) -> None:
    """Each method against Original, in pairs of one seed: steps on the plateau, and perplexities."""
    base = "original"
    waits: dict[str, dict[int, float]] = {run.method: {} for run in runs}
    for run in runs:
        left = left_at(run)
        if left is not None:
            waits[run.method][run.seed] = left
    for method in (method for method in waits if method != base):
        name, other = METHODS[method].title, METHODS[base].title
        gain = paired_gain(waits[method], waits.get(base, {}), higher_is_better=False)
        if gain is not None:
            page.answer(f"{title}: {name} leaves the plateau after fewer steps than {other}", gain, 0)
        apart = _perplexity_difference(runs, method, base)
        if apart is not None:
            pairs = f"{apart.pairs} pair{'s' if apart.pairs > 1 else ''}"
            page.text(f"{title}: {name}'s perplexity is {gain_in_words(apart, 1)} from {other}'s ({pairs}).")


def _perplexity_difference(runs: Sequence[LoggedRun], method: str, base: str) -> Gain | None:
    """Perplexity of a method less that of the base, at the last step that both runs of a seed have."""
    own = {run.seed: dict(run.points) for run in runs if run.method == method}
    other = {run.seed: dict(run.points) for run in runs if run.method == base}
    shared = {
        seed: max(steps)
        for seed in own.keys() & other.keys()
        if (steps := own[seed].keys() & other[seed].keys())
    }
    return paired_gain(
        {seed: own[seed][step] for seed, step in shared.items()},
        {seed: other[seed][step] for seed, step in shared.items()},
        higher_is_better=False,
    )

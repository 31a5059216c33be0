"""The page of the plateau: how long runs stay where the order of words is of no use, by batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from saobp.lab.cells import format_gain, format_percent
from saobp.lab.methods import METHODS
from saobp.lab.pages.common import PLATEAU_END, held_out
from saobp.lab.plateau_figures import BASE, LoggedRun, differences, perplexities
from saobp.lab.result_page import Page
from saobp.lab.results import Results
from saobp.lab.statistics import Gain, as_percent, paired_gain

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
        "same sequence ([what counting gives](without-order.md), a perplexity of 427 ± 10). A run counts as "
        "having left this plateau, which is taken to mean that attention uses word order, from its first "
        f"evaluation with a held-out loss below {PLATEAU_END} (perplexity {level:.0f}) on. Rate, warm-up, "
        "schedule and steps are the paper's; its batch size and the length of its sequences are not printed, "
        "and its texts are not available: Wikipedia, books and reviews stand in."
    )
    page.figure(
        "plateau",
        perplexities(
            {
                title: [run._replace(points=_drawn(run.points)) for run in method_runs]
                for title, method_runs in runs.items()
            },
            level,
            COUNTED if results.plan.scale.recipe == "paper" else None,
        ),
        _caption(runs, level),
    )
    apart = differences(runs)
    if apart is not None:
        page.figure(
            "differences",
            apart,
            "Perplexity minus Original's of the same seed in per cent, a line per pair, broken where "
            "evaluations are missing. Larger differences, while one run of a pair has left the plateau and "
            "the other has not, are beyond the scale.",
        )
    page.table(
        ("batch", "run", "steps", "million tokens", "perplexity there", "left the plateau at"),
        [row for title, method_runs in runs.items() for row in _rows(title, method_runs)],
    )
    for title, method_runs in runs.items():
        _compare(page, title, method_runs)
    page.text(
        "Differences are between runs of the same seed and the same order of texts, with a 95 % t interval "
        "over pairs. Fewer than three pairs decide nothing. Steps until a run leaves are compared where both "
        "runs of a pair did; perplexities at the last step that both have."
    )


def _caption(runs: Mapping[str, Sequence[LoggedRun]], level: float) -> str:
    """Of what the figure of perplexities shows, and of nothing else."""
    stopped = any(not run.is_whole for method_runs in runs.values() for run in method_runs)
    return (
        f"Held-out perplexity, a line per run{', a column per batch size' if len(runs) > 1 else ''}. Thin "
        f"lines: what counting gives, without any order of words. Dotted: perplexity {level:.0f}."
        f"{' A cross: the run stopped before the end of its schedule.' if stopped else ''}"
    )


def logged_runs(results: Results) -> dict[str, list[LoggedRun]]:
    """Runs with held-out losses, by batch size in words."""
    by_title: dict[str, list[LoggedRun]] = {}
    for model in results.models():
        recipe = model.recipe
        points = held_out(results, model)
        if points:
            whole = points[-1][0] >= recipe.steps
            logged = LoggedRun(model.method.key, model.seed, recipe.tokens_per_step, points, whole)
            by_title.setdefault(f"{recipe.batch_size} x {recipe.length} tokens", []).append(logged)
    return by_title


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
    waits: dict[str, dict[int, float]] = {run.method: {} for run in runs}
    for run in runs:
        left = left_at(run)
        if left is not None:
            waits[run.method][run.seed] = left
    for method in (method for method in waits if method != BASE):
        name, base = METHODS[method].title, METHODS[BASE].title
        gain = paired_gain(waits[method], waits.get(BASE, {}), higher_is_better=False)
        if gain is not None:
            page.answer(f"{title}: {name} leaves the plateau after fewer steps than {base}", gain, 0)
        ends, ratios = _end_differences(runs, method)
        if ends is None or ratios is None:
            continue
        ratio_text, pairs = format_percent(ratios), f"{ends.pairs} pair{'s' if ends.pairs > 1 else ''}"
        page.text(
            f"{title}: {name}'s perplexity is {format_gain(ends, 1)} from {base}'s, {ratio_text} ({pairs})."
        )
        _, whole = _end_differences([run for run in runs if run.is_whole], method)
        if whole is not None:
            page.answer(f"{title}: {name} ends at a lower perplexity than {base}, per cent", whole, 1)


def _end_differences(runs: Sequence[LoggedRun], method: str) -> tuple[Gain | None, Gain | None]:
    """Perplexity less Original's, also in per cent, at the last step that both runs of a seed have."""
    method_points = {run.seed: dict(run.points) for run in runs if run.method == method}
    base_points = {run.seed: dict(run.points) for run in runs if run.method == BASE}
    shared = {
        seed: max(steps)
        for seed in method_points.keys() & base_points.keys()
        if (steps := method_points[seed].keys() & base_points[seed].keys())
    }
    ends = [
        {seed: points[seed][step] for seed, step in shared.items()} for points in (method_points, base_points)
    ]
    losses = [{seed: math.log(value) for seed, value in points.items()} for points in ends]
    ratios = paired_gain(*losses, higher_is_better=False)
    return paired_gain(*ends, higher_is_better=False), None if ratios is None else as_percent(ratios)

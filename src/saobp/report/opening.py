"""The page's first sentences and picture: what was compared, what changed, what not to conclude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saobp.report.run_view import Run
from saobp.report.snapshots import Snapshot
from saobp.report.summaries import shown
from saobp.runs.tolerant_reader import number

MOST_TRACKS = 24
METHOD = ("refinement", "regularizer", "seed", "name")
"""Fields of a recipe in which runs of one comparison may differ."""


@dataclass(frozen=True)
class Dot:
    """A head in the picture: where it lies from 0 to 1, its verdict and what it is."""

    place: float
    verdict: str
    title: str


@dataclass(frozen=True)
class Track:
    """A line of the picture: a run, or a layer of the only run."""

    name: str
    index: int | None
    dots: list[Dot]
    note: str


@dataclass(frozen=True)
class Opening:
    """Sentences of the opening, the picture's lines, and GTD of each head in two alike models."""

    compared: str
    changed: str
    caution: str
    tracks: list[Track]
    moves: list[tuple[float, float]]
    caption: str


def opening(runs: Sequence[Run]) -> Opening | None:
    """The opening of a page; None if no run has numbers."""
    known = [run for run in runs if run.health or run.curves or run.result]
    if not known:
        return None
    measured = [(index, run) for index, run in enumerate(runs) if run.health]
    tracks = _tracks(measured)
    return Opening(
        _compared(known),
        _changed(known),
        _caution(known),
        tracks,
        _moves(measured),
        _caption(measured, tracks),
    )


def _compared(runs: Sequence[Run]) -> str:
    names = _listed([run.name for run in runs])
    if len(runs) == 1:
        return f"{runs[0].name}: {_kind(runs[0])}."
    if runs[0].kind == "diagnosis":
        return f"{len(runs)} models on the same texts: {names}."
    if not _is_comparison(runs):
        return f"{len(runs)} runs that differ in more than their attention: {names}."
    methods = _listed([_method(run) for run in runs])
    seeds = list(dict.fromkeys(str(_fact(run, "seed")) for run in runs))
    shared = f"seed{'s' if len(seeds) > 1 else ''} {_listed(seeds)}"
    model = _fact(runs[0], "model") or "model"
    times = {2: "twice", 3: "three times", 4: "four times"}.get(len(runs), f"{len(runs)} times")
    return f"The same {model}, trained {times} on the same data ({shared}): {methods}."


def _changed(runs: Sequence[Run]) -> str:
    """Perplexity, GTD and healthy heads of the only run, or of the first and the last."""
    ends = [runs[0]] if len(runs) == 1 else [runs[0], runs[-1]]
    parts = []
    perplexities = [_perplexity(run) for run in ends]
    if None not in perplexities:
        parts.append(f"validation perplexity {_arrow([f'{perplexity:.4g}' for perplexity in perplexities])}")
    if all(run.health for run in ends):
        last = [run.health[-1] for run in ends]
        means = [_mean_gtd(snapshot) for snapshot in last]
        if None not in means:
            parts.append(f"mean GTD of the heads {_arrow([f'{mean:.3f}' for mean in means])}")
        counts = _arrow([str(snapshot.count("healthy")) for snapshot in last])
        heads = _arrow(list(dict.fromkeys(str(snapshot.heads) for snapshot in last)))
        parts.append(f"healthy heads {counts} of {heads}")
    if not parts:
        return ""
    start = "" if len(ends) == 1 else f"from {ends[0].name} to {ends[1].name}: "
    text = f"{start}{', '.join(parts)}."
    return text[0].upper() + text[1:]


def _arrow(texts: Sequence[str]) -> str:
    return " \N{RIGHTWARDS ARROW} ".join(texts)


def _caution(runs: Sequence[Run]) -> str:
    trained = [run for run in runs if run.kind != "diagnosis"]
    if not trained:
        return (
            "What it is not: a verdict describes attention on these texts; it does not say that a model is "
            "good or bad, nor that a change of it would help."
        )
    if len(trained) == 1:
        return "What not to conclude: one run says nothing about what another seed or setting would give."
    seeds: dict[str, set[Any]] = {}
    for run in trained:
        seeds.setdefault(_method(run), set()).add(_fact(run, "seed"))
    fewest = min(len(values) for values in seeds.values())
    if fewest < 2:
        return (
            "What not to conclude: with one seed each a difference is no evidence for or against a method; "
            "seeds alone often differ by as much. Train several seeds of each to know."
        )
    return (
        f"{fewest} seeds or more of each method: a difference smaller than the spread over seeds is no "
        "difference."
    )


def _tracks(measured: Sequence[tuple[int, Run]]) -> list[Track]:
    if len(measured) == 1:
        _, run = measured[0]
        last = run.health[-1]
        return [
            Track(f"layer {layer}", None, _dots(last, [layer]), "") for layer in range(len(last.verdicts))
        ][:MOST_TRACKS]
    return [
        Track(run.name, index, _dots(run.health[-1], range(len(run.health[-1].verdicts))), _ending(run))
        for index, run in measured
    ][:MOST_TRACKS]


def _dots(snapshot: Snapshot, layers: Sequence[int] | range) -> list[Dot]:
    grid = snapshot.statistics.get("gtd", [])
    return [
        Dot(value, snapshot.verdicts[layer][head], f"layer {layer}, head {head}: GTD {shown(value)}")
        for layer in layers
        if layer < len(grid)
        for head, value in enumerate(grid[layer])
        if value is not None
    ]


def _moves(measured: Sequence[tuple[int, Run]]) -> list[tuple[float, float]]:
    """GTD of each head in the first and in the second of exactly two models with the same heads."""
    if len(measured) != 2:
        return []
    grids = [run.health[-1].statistics.get("gtd", []) for _, run in measured]
    if [len(row) for row in grids[0]] != [len(row) for row in grids[1]]:
        return []
    pairs = [pair for rows in zip(*grids, strict=True) for pair in zip(*rows, strict=True)]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _caption(measured: Sequence[tuple[int, Run]], tracks: Sequence[Track]) -> str:
    if not tracks or not any(track.dots for track in tracks):
        return ""
    steps = {run.health[-1].step for _, run in measured}
    when = f", at step {step:,}" if len(steps) == 1 and (step := next(iter(steps))) is not None else ""
    where = "on the texts of the diagnosis" if measured[0][1].kind == "diagnosis" else "on held-out text"
    return f"Each dot is a head, placed by its GTD {where}{when}."


def _is_comparison(runs: Sequence[Run]) -> bool:
    """Whether the recipes agree in all but method and seed."""
    recipes = [
        {name: value for name, value in run.recipe if name.partition(".")[0] not in METHOD} for run in runs
    ]
    return bool(recipes[0]) and all(recipe == recipes[0] for recipe in recipes)


def _kind(run: Run) -> str:
    if run.kind == "diagnosis":
        return "a diagnosis of its attention"
    model = _fact(run, "model") or "a model"
    return str(model) if _method(run) == "plain" else f"{model} with {_method(run)}"


def _method(run: Run) -> str:
    refinement, regularizer = _fact(run, "refinement"), _fact(run, "regularizer")
    parts = [str(part) for part in (refinement, regularizer) if part and part != "none"]
    return " and ".join(parts) or "plain"


def _fact(run: Run, name: str) -> Any:
    return dict(run.facts).get(name)


def _perplexity(run: Run) -> float | None:
    numbers = dict(run.result)
    return number(numbers.get("eval_perplexity", numbers.get("perplexity")))


def _ending(run: Run) -> str:
    perplexity = _perplexity(run)
    return "" if perplexity is None else f"perplexity {perplexity:.4g}"


def _mean_gtd(snapshot: Snapshot) -> float | None:
    values = [dot.place for dot in _dots(snapshot, range(len(snapshot.verdicts)))]
    return sum(values) / len(values) if values else None


def _listed(names: Sequence[str]) -> str:
    few = list(dict.fromkeys(names))
    if len(few) > 4:
        few = [*few[:3], f"{len(few) - 3} more"]
    return few[0] if len(few) == 1 else f"{', '.join(few[:-1])} and {few[-1]}"

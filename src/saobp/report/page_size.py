"""Size limits of a page, so that it can be mailed.

Of its 6 MB, plotly takes 2, curves and maps of heads at most about as much again. The explorer has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from saobp.report.run_view import Run

POINTS, ALL_POINTS = 600, 40_000
"""Most points of one curve, about a screen's resolution, and of all curves together."""
SNAPSHOTS, ALL_CELLS = 60, 180_000
"""Most snapshots of training at which all heads are shown, and most numbers in all of their maps together."""


def thinned(runs: Sequence[Run]) -> list[Run]:
    """The runs downsampled to the limits of a page; the last snapshot always stays."""
    curves = sum(len(series) for run in runs for series in run.curves.values())
    points = max(24, min(POINTS, ALL_POINTS // max(1, curves)))
    cells = sum(run.health[-1].cells for run in runs if run.health)
    snapshots = max(2, min(SNAPSHOTS, ALL_CELLS // max(1, cells)))
    return [
        replace(
            run,
            curves={name: [one.thin(points) for one in series] for name, series in run.curves.items()},
            health=_spread(run.health, snapshots),
        )
        for run in runs
    ]


def _spread(entries: list[Any], most: int) -> list[Any]:
    if len(entries) <= most:
        return entries
    return [entries[round(index * (len(entries) - 1) / (most - 1))] for index in range(most)]


def fitted(explorer: dict[str, Any], room: int) -> dict[str, Any]:
    """The first sentences whose scores fit into ``room`` bytes; of a single long one, some of its layers.

    ``left_out`` notes what was dropped.
    """
    sizes = [_size(sentence["scores"]) for sentence in explorer["sentences"]]
    kept, used = 0, 0
    while kept < len(sizes) and used + sizes[kept] <= room:
        used += sizes[kept]
        kept += 1
    sentences, notes = explorer["sentences"][:kept], list(explorer["left_out"])
    if kept < len(sizes) and kept:
        notes.append(
            f"Of {len(sizes)} sentences the first {kept} are here; the rest would make the page too large."
        )
    if not kept:
        first = explorer["sentences"][0]
        layers = len(first["scores"])
        count = max(1, int(layers * room / sizes[0]))
        chosen = {round(index * (layers - 1) / max(1, count - 1)) for index in range(count)}
        scores = [own if layer in chosen else [None] * len(own) for layer, own in enumerate(first["scores"])]
        sentences = [{**first, "scores": _trimmed(scores, room)}]
        heads = sum(head is not None for own in sentences[0]["scores"] for head in own)
        total = sum(len(own) for own in first["scores"])
        notes.append(
            f"The scores of {heads} of {total} heads on one sentence are here; "
            "more would make the page too large."
        )
    return {**explorer, "sentences": sentences, "left_out": notes}


def _trimmed(scores: list[list[Any]], room: int) -> list[list[Any]]:
    """Drop heads that do not fit; the first one stays."""
    used, trimmed = 0, []
    for own in scores:
        row = []
        for head in own:
            size = 0 if head is None else len(head["codes"])
            row.append(head if used == 0 or used + size <= room else None)
            used += size if row[-1] is not None else 0
        trimmed.append(row)
    return trimmed


def _size(scores: list[list[Any]]) -> int:
    return sum(len(head["codes"]) + 64 for own in scores for head in own if head is not None)

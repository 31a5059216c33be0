"""What of the explorers' scores goes into a page that must stay small enough to be mailed."""

from __future__ import annotations

from typing import Any


def fitted(explorer: dict[str, Any], room: int) -> dict[str, Any]:
    """The first sentences whose scores fit into ``room`` bytes; of a single long one, some of its layers.

    What was left out is said in ``left_out``.
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
        chosen = {round(place * (layers - 1) / max(1, count - 1)) for place in range(count)}
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
    """Drops the last heads that are still too many; the very first stays."""
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

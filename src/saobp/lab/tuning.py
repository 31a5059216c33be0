"""Which recipe is best for Original: its losses by recipe and seed, for each model and budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from saobp.lab.arena_records import ORIGINAL, Setting, in_fields, method_of, settings_of
from saobp.lab.result_page import markdown_table


def tuning_tables(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table for each model and budget that was trained with several recipes on the same seeds."""
    plain = [record for record in records if method_of(record["recipe"]) == ORIGINAL]
    found: dict[tuple[str, str, int, int], list[Setting]] = {}
    for record in sorted(plain, key=lambda record: record.get("started", "")):
        (first,) = settings_of([record])
        if first.budget not in found:
            alike = [one for one in settings_of(plain) if one.budget == first.budget and one.losses]
            same = [one for one in alike if one.recipe == first.recipe]
            found[first.budget] = same + [one for one in alike if one.recipe != first.recipe]
    return [table for settings in found.values() for table in _table(settings)]


def _table(settings: Sequence[Setting]) -> Iterable[str]:
    """Recipes by rows, named by what they change in the first; the lowest mean on top."""
    losses = {number: setting.losses[ORIGINAL] for number, setting in enumerate(settings)}
    counts = Counter(seed for own in losses.values() for seed in own)
    seeds = [seed for seed, recipes in counts.items() if recipes > 1]
    if not seeds:
        return
    base = settings[0].recipe
    rows = []
    for number, setting in enumerate(settings):
        own = [losses[number].get(seed) for seed in seeds]
        if any(loss is not None for loss in own):
            changes = {name: value for name, value in setting.recipe.items() if base.get(name) != value}
            cells = ["" if loss is None else f"{math.exp(loss):.2f}" for loss in own]
            all_of_them = [loss for loss in own if loss is not None]
            whole = mean(all_of_them) if len(all_of_them) == len(own) else math.inf
            name = ", ".join(f"`{change}`" for change in in_fields(changes)) or "as it was"
            rows.append((whole, [name, *cells, f"{whole:.4f}" if math.isfinite(whole) else ""]))
    headers = ["change of the recipe", *(f"perplexity, seed {seed}" for seed in seeds), "mean loss"]
    yield markdown_table(headers, [row for _, row in sorted(rows, key=lambda one: one[0])])

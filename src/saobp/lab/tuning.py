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
    by_budget: dict[tuple[str, str, int, int], list[Setting]] = {}
    for record in sorted(plain, key=lambda record: record.get("started", "")):
        (first,) = settings_of([record])
        if first.budget not in by_budget:
            alike = [
                setting for setting in settings_of(plain) if setting.budget == first.budget and setting.losses
            ]
            same = [setting for setting in alike if setting.recipe == first.recipe]
            by_budget[first.budget] = same + [setting for setting in alike if setting.recipe != first.recipe]
    return [table for settings in by_budget.values() for table in _table(settings)]


def _table(settings: Sequence[Setting]) -> Iterable[str]:
    """Recipes by rows, named by what they change in the first; the lowest mean on top."""
    losses = {number: setting.losses[ORIGINAL] for number, setting in enumerate(settings)}
    counts = Counter(seed for losses_of_seeds in losses.values() for seed in losses_of_seeds)
    seeds = [seed for seed, recipes in counts.items() if recipes > 1]
    if not seeds:
        return
    base = settings[0].recipe
    rows = []
    for number, setting in enumerate(settings):
        losses_of_seeds = [losses[number].get(seed) for seed in seeds]
        if any(loss is not None for loss in losses_of_seeds):
            changes = {name: value for name, value in setting.recipe.items() if base.get(name) != value}
            cells = ["" if loss is None else f"{math.exp(loss):.2f}" for loss in losses_of_seeds]
            all_of_them = [loss for loss in losses_of_seeds if loss is not None]
            whole = mean(all_of_them) if len(all_of_them) == len(losses_of_seeds) else math.inf
            name = ", ".join(f"`{change}`" for change in in_fields(changes)) or "as it was"
            rows.append((whole, [name, *cells, f"{whole:.4f}" if math.isfinite(whole) else ""]))
    headers = ["change of the recipe", *(f"perplexity, seed {seed}" for seed in seeds), "mean loss"]
    yield markdown_table(headers, [row for _, row in sorted(rows, key=lambda one: one[0])])

"""Which recipe is best for plain attention: its losses by recipe and seed, for each model and budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from saobp.lab.arena_records import ORIGINAL, Setting, in_fields, method_of, settings_of
from saobp.lab.cells import markdown_table


def tuning_tables(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Tables for each model, budget and corpus that was trained with several recipes on the same seeds."""
    plain = [record for record in records if method_of(record["recipe"]) == ORIGINAL]
    groups: dict[tuple[Any, ...], list[Setting]] = {}
    for record in sorted(plain, key=lambda record: record.get("started", "")):
        (first,) = settings_of([record])
        if _trained(first) not in groups:
            alike = [other for other in settings_of(plain) if _trained(other) == _trained(first)]
            alike = [other for other in alike if other.losses]
            same = [other for other in alike if other.recipe == first.recipe]
            groups[_trained(first)] = same + [other for other in alike if other.recipe != first.recipe]
    return [table for settings in groups.values() for table in _tables(settings)]


def _trained(setting: Setting) -> tuple[Any, ...]:
    """Model, budget and texts: losses of other recipes compare."""
    return *setting.budget, setting.recipe["corpus"]


def _tables(settings: Sequence[Setting]) -> Iterable[str]:
    """A table for each set of seeds that a recipe was trained with, of all recipes that have these."""
    losses = [setting.losses[ORIGINAL] for setting in settings]
    counts = Counter(seed for by_seed in losses for seed in by_seed)
    shared = [[seed for seed in counts if counts[seed] > 1 and seed in by_seed] for by_seed in losses]
    for seeds in sorted({tuple(some) for some in shared if some}, key=len, reverse=True):
        rows = [
            (_change(setting, settings[0]), [by_seed[seed] for seed in seeds])
            for setting, by_seed in zip(settings, losses, strict=True)
            if by_seed.keys() >= set(seeds)
        ]
        if len(rows) > 1:
            yield markdown_table(
                ["change of the recipe", *(f"perplexity, seed {seed}" for seed in seeds), "mean loss"],
                [
                    [name, *(f"{math.exp(loss):.2f}" for loss in row), f"{mean(row):.4f}"]
                    for name, row in sorted(rows, key=lambda pair: mean(pair[1]))
                ],
            )


def _change(setting: Setting, base: Setting) -> str:
    """What a recipe changes in another."""
    changes = {name: value for name, value in setting.recipe.items() if base.recipe.get(name) != value}
    return ", ".join(f"`{change}`" for change in in_fields(changes)) or "as it was"

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
    """Tables for each model, budget and corpus that was trained with several recipes on the same seeds."""
    plain = [record for record in records if method_of(record["recipe"]) == ORIGINAL]
    found: dict[tuple[Any, ...], list[Setting]] = {}
    for record in sorted(plain, key=lambda record: record.get("started", "")):
        (first,) = settings_of([record])
        if _trained(first) not in found:
            alike = [one for one in settings_of(plain) if _trained(one) == _trained(first) and one.losses]
            same = [one for one in alike if one.recipe == first.recipe]
            found[_trained(first)] = same + [one for one in alike if one.recipe != first.recipe]
    return [table for settings in found.values() for table in _tables(settings)]


def _trained(setting: Setting) -> tuple[Any, ...]:
    """Model, budget and texts: losses of other recipes compare."""
    return *setting.budget, setting.recipe["corpus"]


def _tables(settings: Sequence[Setting]) -> Iterable[str]:
    """A table for each set of seeds that a recipe was trained with, of all recipes that have these."""
    losses = [setting.losses[ORIGINAL] for setting in settings]
    counts = Counter(seed for own in losses for seed in own)
    shared = [[seed for seed in counts if counts[seed] > 1 and seed in own] for own in losses]
    for seeds in sorted({tuple(own) for own in shared if own}, key=len, reverse=True):
        rows = [
            (_change(setting, settings[0]), [own[seed] for seed in seeds])
            for setting, own in zip(settings, losses, strict=True)
            if own.keys() >= set(seeds)
        ]
        if len(rows) > 1:
            yield markdown_table(
                ["change of the recipe", *(f"perplexity, seed {seed}" for seed in seeds), "mean loss"],
                [
                    [name, *(f"{math.exp(loss):.2f}" for loss in own), f"{mean(own):.4f}"]
                    for name, own in sorted(rows, key=lambda row: mean(row[1]))
                ],
            )


def _change(setting: Setting, base: Setting) -> str:
    """What a recipe changes in another."""
    changes = {name: value for name, value in setting.recipe.items() if base.recipe.get(name) != value}
    return ", ".join(f"`{change}`" for change in in_fields(changes)) or "as it was"

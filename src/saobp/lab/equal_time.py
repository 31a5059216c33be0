"""Methods against plain attention trained for more steps: is a gain worth the time that its steps take?"""

from __future__ import annotations

from collections.abc import Iterable

from saobp.lab.arena_records import ORIGINAL, Setting, title_of
from saobp.lab.cells import format_percent, format_verdict
from saobp.lab.statistics import as_percent, paired_gain

MOST_STEPS = 1.2
"""Plain attention with at most so many times the steps is compared; beyond that it is another budget."""
HEADERS = ("method", "plain attention has", "difference from it [95 % interval]", "lower in", "verdict")


def equal_time_rows(setting: Setting, settings: Iterable[Setting]) -> Iterable[list[str]]:
    """Rows of HEADERS: differences from plain attention of the same recipe but for its number of steps.

    Of each number of steps plain attention with the usual steps comes first.
    """
    steps = setting.recipe["steps"]
    longer = [one for one in settings if _is_longer(one, setting)]
    for other in sorted(longer, key=lambda one: one.recipe["steps"]):
        more = f"{100 * (other.recipe['steps'] / steps - 1):.3g} % more steps"
        for method in [ORIGINAL, *setting.gains()]:
            losses = setting.losses[method], other.losses[ORIGINAL]
            gain = paired_gain(*losses, higher_is_better=False, least_pairs=setting.least_pairs)
            if gain is not None:
                seeds = losses[0].keys() & losses[1].keys()
                lower = sum(losses[0][seed] < losses[1][seed] for seed in seeds)
                gain = as_percent(gain)
                yield [
                    *(title_of(method), more, format_percent(gain)),
                    *(f"{lower} of {len(seeds)}", format_verdict(gain, None)),
                ]


def _is_longer(other: Setting, setting: Setting) -> bool:
    if ORIGINAL not in other.losses or other.data != setting.data:
        return False
    same = {**other.recipe, "steps": setting.recipe["steps"]} == setting.recipe
    return same and 1 < other.recipe["steps"] / setting.recipe["steps"] <= MOST_STEPS

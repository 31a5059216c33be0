"""The runs of round seven of results/arena/plan.md in their order, written before the runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from saobp.refinement import Refinement
from saobp.training.recipes import PretrainRecipe, named_recipe, with_steps

ORIGINAL = "none"
LEARNED = "high:learned"
KEY_BIAS = "high-key-bias:learned"
STEPS, ROWS, LENGTH = 3000, 256, 128
MIXTURE = "wikipedia_en,gutenberg_books,imdb_reviews"
STRENGTHS_RATE = 0.01
"""Learning rate of numbers per head, whatever the rate of other parameters."""
TUNING: dict[str, dict[str, Any]] = {
    "rate-2.8e-3": {"learning_rate": 2.8e-3},
    "rate-2e-3": {"learning_rate": 2e-3},
    "rate-1.4e-3": {"learning_rate": 1.4e-3},
    "rate-1e-3": {"learning_rate": 1e-3},
    "warmup-600": {"learning_rate": 2e-3, "warmup_steps": 600},
}
"""What settings of ModernBERT-small change in the recipe ``modern``; the first is the recipe itself."""
TUNING_SEEDS = (42, 9)
PAIR_SEEDS = (31, 32, 33, 34, 35)
"""For Original and learned strengths of small at the chosen setting, and of mini in OTHERS."""
OTHERS: dict[str, dict[str, Any]] = {"books": {"corpus": "gutenberg_books"}}
"""What further settings of ModernBERT-mini change in the tuned recipe ``modern``."""
MEDIUM_SEEDS = PAIR_SEEDS[:2]
MEDIUM_RATE = 5 / 7
"""Medium's rate over small's, as in the recipe ``modern``."""
RIVALS = ("gate", "sinkhorn", "sinkhorn-3", "sink", "softmax-plus-one", "sigma-reparam")
"""Methods that have not been trained at the tuned recipe."""
RIVAL_SEEDS = (11, 12, 13, 14, 15, 16, 17, 18)
"""Seeds of which Original, QK-norm and learned strengths in both forms are recorded."""
MANY_SEEDS = tuple(range(51, 71))
COMPARED = (ORIGINAL, LEARNED, KEY_BIAS, "qk-norm", f"{LEARNED}+qk-norm", f"{KEY_BIAS}+qk-norm")


@dataclass(frozen=True)
class Run:
    """A method and a seed.

    setting: one of TUNING for small and medium; one of OTHERS, or None for the tuned recipe, for mini
    """

    form: str
    seed: int
    size: str = "mini"
    setting: str | None = None

    @property
    def name(self) -> str:
        form = "original" if self.form == ORIGINAL else self.form.removeprefix("high:")
        parts = [self.size, self.setting, form.replace("+", "-").replace(":", "-"), str(self.seed)]
        return "-".join(["modernbert", *(part for part in parts if part is not None)])

    @property
    def changes(self) -> dict[str, Any]:
        """What the setting changes in the recipe ``modern`` of the size."""
        if self.size == "mini":
            return {} if self.setting is None else OTHERS[self.setting]
        own = dict(TUNING[self.setting or ""])
        return {**own, "learning_rate": MEDIUM_RATE * own["learning_rate"]} if self.size == "medium" else own

    @property
    def recipe(self) -> PretrainRecipe:
        """The recipe ``modern`` for 98 million tokens, without evaluations during training."""
        usual = with_steps(named_recipe("modern", "modernbert", self.size), STEPS)
        usual = replace(usual, **{"batch_size": ROWS, "length": LENGTH, "corpus": MIXTURE, **self.changes})
        return replace(
            usual,
            evaluation_steps=STEPS,
            checkpoint_steps=STEPS // 5,
            health_texts=0,
            refinement=None if self.form == ORIGINAL else Refinement.of(self.form),
            strength_rate=STRENGTHS_RATE / usual.learning_rate,
            seed=self.seed,
        )

    @property
    def command(self) -> list[str]:
        """The words that make this run again, whatever the recipe ``modern`` is by then."""
        recipe = self.recipe
        words = ["saobp", "pretrain", "--recipe", "modern", "--family", "modernbert", "--size", self.size]
        words += ["--steps", str(recipe.steps), "--refinement", self.form, "--seed", str(self.seed)]
        for name in (
            *("batch_size", "length", "learning_rate", "warmup_steps", "masked_share", "masked_share_end"),
            *("strength_rate", "evaluation_steps", "checkpoint_steps", "health_texts"),
        ):
            value = getattr(recipe, name)
            words += ["--set", f"{name}={'none' if value is None else value}"]
        return [*words, "--corpus", recipe.corpus, "--tokens", "tokens", "--out", f"runs/{self.name}"]


FIRST = tuple(Run(form, seed) for seed in MANY_SEEDS for form in COMPARED)
"""How large is the gain, and do the two forms differ? All forms of a seed before the next seed."""


def tuning_runs() -> Iterator[Run]:
    """Original of small, one seed after the other."""
    return (Run(ORIGINAL, seed, "small", setting) for seed in TUNING_SEEDS for setting in TUNING)


def chosen_setting(losses: Mapping[Run, float | None]) -> str | None:
    """The setting with the lowest mean held-out loss of Original; None while a run of tuning is missing.

    losses: of ended runs; None of one that failed. A setting with a failed run, or a loss that is not
    finite, is left out.
    """
    if any(run not in losses for run in tuning_runs()):
        return None
    means = {}
    for setting in TUNING:
        own = [losses[Run(ORIGINAL, seed, "small", setting)] for seed in TUNING_SEEDS]
        finite = [loss for loss in own if loss is not None and math.isfinite(loss)]
        if len(finite) == len(own):
            means[setting] = mean(finite)
    return min(means, key=means.__getitem__, default=None)


def planned_runs(chosen: str | None = None) -> Iterator[Run]:
    """What comes first, tuning of small, its pairs, pairs of other settings and of medium, then rivals.

    chosen: the setting of small and medium; without it their pairs are left out
    """
    yield from dict.fromkeys((*FIRST, *_usual_order(chosen)))


def _usual_order(chosen: str | None) -> Iterator[Run]:
    yield from tuning_runs()
    if chosen is not None:
        yield from _pairs(PAIR_SEEDS, "small", chosen)
    for setting in OTHERS:
        yield from _pairs(PAIR_SEEDS, "mini", setting)
    if chosen is not None:
        yield from _pairs(MEDIUM_SEEDS, "medium", chosen)
    yield from (Run(rival, seed) for seed in RIVAL_SEEDS for rival in RIVALS)


def _pairs(seeds: Iterable[int], size: str, setting: str) -> Iterator[Run]:
    return (Run(form, seed, size, setting) for seed in seeds for form in (ORIGINAL, LEARNED))

"""The runs of round two of results/arena/plan.md and its rules, as code that was written before the runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from saobp.refinement import Refinement
from saobp.training.recipes import PretrainRecipe, named_recipe, with_steps

ORIGINAL = "none"
TUNING_SEEDS, FRESH_SEEDS, DECODER_SEEDS = (42, 9), tuple(range(11, 19)), (11, 12, 13)
CORPUS = "wikipedia_en,gutenberg_books,imdb_reviews"
USUAL = "adamw"
"""The setting of round one, whose runs are recorded."""
STRENGTHS_RATE = 0.01
"""Learning rate of numbers per head, whatever the rate of other parameters."""
BASE: dict[str, Any] = {
    "steps": 3000,
    "batch_size": 256,
    "learning_rate": 4e-3,
    "warmup_steps": 150,
    "masked_share": 0.15,
    "masked_share_end": None,
    "optimizer": "adamw",
    "muon_rate": 1.0,
    "averaged_share": 0.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    USUAL: {},
    "muon": {"optimizer": "muon"},
    "muon-twice": {"optimizer": "muon", "muon_rate": 2.0},
    "warmup-600": {"warmup_steps": 600},
    "rate-3e-3": {"learning_rate": 3e-3},
    "masked-30-to-15": {"masked_share": 0.30, "masked_share_end": 0.15},
    "batch-128": {"batch_size": 128, "steps": 6000, "warmup_steps": 300},
    "averaged-tenth": {"averaged_share": 0.1},
}
"""What a setting changes in BASE, in the order in which they are run."""
FORMS = (
    ORIGINAL,
    "high:learned+temperature",
    "temperature",
    "qk-norm",
    "high:learned+qk-norm",
    "high:learned",
)
"""Methods of the confirmation, in the order in which a seed's runs are made."""
DECODER_FORMS = FORMS[:3]


@dataclass(frozen=True)
class Run:
    setting: str
    form: str
    seed: int
    family: str = "modernbert"

    @property
    def name(self) -> str:
        form = "original" if self.form == ORIGINAL else self.form.replace("high:", "").replace("+", "-")
        return f"{self.family}-mini-{self.setting}-{form}-{self.seed}"

    @property
    def recipe(self) -> PretrainRecipe:
        """BASE with the setting's changes, without evaluations during training."""
        fields = BASE | SETTINGS[self.setting]
        usual = with_steps(named_recipe("modern", self.family, "mini"), fields["steps"])
        return replace(
            usual,
            **fields,
            evaluation_steps=fields["steps"],
            checkpoint_steps=fields["steps"],
            health_texts=0,
            refinement=None if self.form == ORIGINAL else Refinement.of(self.form),
            strength_rate=STRENGTHS_RATE / fields["learning_rate"],
            seed=self.seed,
            corpus=CORPUS,
        )

    @property
    def command(self) -> list[str]:
        """The words that make this run again, whatever the recipe ``modern`` is by then."""
        recipe = self.recipe
        names = [name for name in BASE if name != "steps"]
        names += ["strength_rate", "evaluation_steps", "checkpoint_steps", "health_texts"]
        values = {name: getattr(recipe, name) for name in names}
        words = [*("saobp", "pretrain", "--recipe", "modern"), *("--family", self.family, "--size", "mini")]
        words += ["--steps", str(recipe.steps), "--refinement", self.form, "--seed", str(self.seed)]
        for name, value in values.items():
            words += ["--set", f"{name}={'none' if value is None else value}"]
        return [*words, "--corpus", CORPUS, "--tokens", "tokens", "--out", f"runs/{self.name}"]


Losses = Mapping[str, Mapping[int, float]]
"""Held-out losses of Original by setting and seed."""


def tuning_runs(settings: int) -> Iterator[Run]:
    """Original alone, with the first so many settings after the recorded one."""
    for setting in list(SETTINGS)[1 : settings + 1]:
        yield from (Run(setting, ORIGINAL, seed) for seed in TUNING_SEEDS)


def recorded_losses(records: list[dict[str, Any]], commit: str) -> dict[int, float]:
    """Losses of USUAL by seed, from records of Original's runs of one commit."""
    return {
        record["recipe"]["seed"]: record["result"]["eval_loss"]
        for record in records
        if record["commit"].startswith(commit)
        and record["recipe"]["seed"] in TUNING_SEEDS
        and record["recipe"]["refinement"] is None
    }


def choose(losses: Losses) -> tuple[str, dict[str, float], list[str]]:
    """The setting of the lowest mean loss over the seeds of tuning, all means, and what was left out."""
    means: dict[str, float] = {}
    for setting in SETTINGS:
        own = [losses.get(setting, {}).get(seed, math.nan) for seed in TUNING_SEEDS]
        if all(map(math.isfinite, own)):
            means[setting] = mean(own)
    if not means:
        raise ValueError("no setting has finite losses on all seeds of tuning")
    return min(means, key=means.__getitem__), means, [one for one in SETTINGS if one not in means]


def confirming_runs(setting: str) -> Iterator[Run]:
    """All methods of one fresh seed after the other: time sets the number of seeds, not what they show."""
    return (Run(setting, form, seed) for seed in FRESH_SEEDS for form in FORMS)


def decoder_runs(setting: str) -> Iterator[Run]:
    """If time remains: strict decoders, three methods of one seed after the other."""
    return (Run(setting, form, seed, "llama") for seed in DECODER_SEEDS for form in DECODER_FORMS)

"""The runs of round four of results/arena/plan.md in their order, written before the runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from saobp.refinement import Refinement
from saobp.training.recipes import PretrainRecipe, named_recipe, with_steps

ORIGINAL = "none"
LEARNED = "high:learned"
STEPS, ROWS, LENGTH = 3000, 256, 128
MIXTURE = "wikipedia_en,gutenberg_books,imdb_reviews"
STRENGTHS_RATE = 0.01
"""Learning rate of numbers per head, whatever the rate of other parameters."""
SETTINGS: dict[str, dict[str, Any]] = {"decoder": {"family": "llama"}, "small": {"size": "small"}}
"""What a setting changes in ModernBERT-mini with 128 tokens on three corpora."""
SETTING_SEEDS = (21, 22, 23, 24, 25, 26, 27, 28)
RECORDED = {(setting, seed) for setting in SETTINGS for seed in (21, 22, 23, 24, 25)}
"""Pairs that have been made."""
RIVALS = (
    "gate",
    "sinkhorn",
    "sinkhorn-3",
    "sink",
    "softmax-plus-one",
    "sigma-reparam",
    "query-bias",
    "high-key-bias:learned",
)
"""Methods that have not been trained at the tuned recipe."""
RIVAL_SEEDS = (11, 12, 13, 14, 15, 16, 17, 18)
"""Seeds of which Original and learned strengths are recorded."""


@dataclass(frozen=True)
class Run:
    form: str
    seed: int
    family: str = "modernbert"
    size: str = "mini"

    @property
    def name(self) -> str:
        form = "original" if self.form == ORIGINAL else self.form.removeprefix("high:")
        form = form.replace("+", "-").replace(":", "-")
        return f"{self.family}-{self.size}-{form}-{self.seed}"

    @property
    def recipe(self) -> PretrainRecipe:
        """The recipe ``modern`` for 98 million tokens, without evaluations during training."""
        usual = with_steps(named_recipe("modern", self.family, self.size), STEPS)
        return replace(
            usual,
            batch_size=ROWS,
            length=LENGTH,
            evaluation_steps=STEPS,
            checkpoint_steps=STEPS,
            health_texts=0,
            refinement=None if self.form == ORIGINAL else Refinement.of(self.form),
            strength_rate=STRENGTHS_RATE / usual.learning_rate,
            seed=self.seed,
            corpus=MIXTURE,
        )

    @property
    def is_large(self) -> bool:
        """Whether it needs much of the GPU's memory: decoders predict every token, 25 GB in all."""
        return self.family == "llama"

    @property
    def command(self) -> list[str]:
        """The words that make this run again, whatever the recipe ``modern`` is by then."""
        recipe = self.recipe
        words = ["saobp", "pretrain", "--recipe", "modern", "--family", self.family, "--size", self.size]
        words += ["--steps", str(recipe.steps), "--refinement", self.form, "--seed", str(self.seed)]
        for name in (
            *("batch_size", "length", "learning_rate", "warmup_steps", "masked_share", "masked_share_end"),
            *("strength_rate", "evaluation_steps", "checkpoint_steps", "health_texts"),
        ):
            value = getattr(recipe, name)
            words += ["--set", f"{name}={'none' if value is None else value}"]
        return [*words, "--corpus", MIXTURE, "--tokens", "tokens", "--out", f"runs/{self.name}"]


def planned_runs() -> Iterator[Run]:
    """Pairs of Original and learned strengths in both settings, then rivals, one seed after the other."""
    for seed in SETTING_SEEDS:
        for setting, changes in SETTINGS.items():
            if (setting, seed) not in RECORDED:
                yield from (Run(form, seed, **changes) for form in (ORIGINAL, LEARNED))
    yield from (Run(rival, seed) for seed in RIVAL_SEEDS for rival in RIVALS)

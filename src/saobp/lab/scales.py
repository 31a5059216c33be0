"""How large an experiment is: from a minute on a laptop to the paper's medium models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from saobp.lab.methods import METHODS
from saobp.training.recipes import PretrainRecipe, named_recipe, with_steps

SEEDS = (42, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
"""In order of use; paired runs share the seed and so the order of the data."""
CORPUS = "wikipedia_en,gutenberg_books,imdb_reviews"
"""Substitutes for WikiText-103, BookCorpus and OpenWebText, each read once per epoch."""

CHECKPOINT_STEPS = 4000
"""Half a minute of training mini on a large GPU."""


@dataclass(frozen=True)
class Scale:
    """The size of all experiments.

    recipe, steps: of pretraining; steps None are the mini model's for ``fast``, so that all sizes learn from
        as many tokens, and the recipe's own for ``paper``
    batch: rows of a batch, which the paper does not print; None for the recipe's
    vocabulary: train a tokenizer of this size instead of using the family's
    rows, epochs:  of fine-tuning; None for all rows and for the task's own epochs
    texts, length: texts on which heads are measured, and their tokens at most
    positions: positions that pseudo-perplexity masks
    """

    name: str
    size: str
    recipe: str
    corpus: str = CORPUS
    steps: int | None = None
    vocabulary: int | None = None
    rows: int | None = None
    epochs: int | None = None
    texts: int = 1024
    length: int = 128
    positions: int = 5_000
    batch: int | None = None

    def recipe_of(self, family: str, method: str, seed: int, corpus: str | None = None) -> PretrainRecipe:
        """The recipe of one run: the scale's, or ``modern`` for its families."""
        name = "modern" if self.recipe == "fast" and family in ("modernbert", "llama") else self.recipe
        recipe = named_recipe(name, family, self.size)
        if name != "paper":
            recipe = with_steps(recipe, self.steps or named_recipe(name, family, "mini").steps)
        saving = min(CHECKPOINT_STEPS, recipe.steps // 2) // recipe.log_steps * recipe.log_steps
        chosen = METHODS[method]
        return replace(
            recipe,
            refinement=chosen.refined(self.size),
            regularizer=chosen.regularizer,
            seed=seed,
            corpus=self.corpus if corpus is None else corpus,
            checkpoint_steps=saving,
            batch_size=self.batch or recipe.batch_size,
        )


SIZES = ("mini", "small", "medium")
PAPER_BATCHES = (32, 64, 128, 256)
"""Batch sizes at which the paper's recipe is tried; the first is the default."""


def _paper_scale(size: str, batch: int) -> Scale:
    suffix = "" if batch == PAPER_BATCHES[0] else f"-{batch}"
    return Scale(f"{size}-paper{suffix}", size, "paper", batch=batch)


SCALES = {
    scale.name: scale
    for scale in (
        Scale("smoke", "tiny", "tiny", "made-up", 20, 400, 16, 1, texts=8, length=64, positions=64),
        *(Scale(size, size, "fast") for size in SIZES),
        *(_paper_scale(size, batch) for size in SIZES for batch in PAPER_BATCHES),
    )
}
"""By name, which is also the name of its pages: ``mini``, ``mini-paper`` (batch 32), ``mini-paper-64``."""


def get_scale(name: str, recipe: str = "fast", batch: int | None = None) -> Scale:
    """The scale of a name; with the recipe ``paper``, that of the same size as the paper printed it."""
    if recipe not in ("fast", "paper"):
        raise ValueError(f"the lab has no recipe {recipe!r}: choose fast or paper")
    if batch is not None and (recipe != "paper" or batch not in PAPER_BATCHES):
        choices = ", ".join(map(str, PAPER_BATCHES))
        raise ValueError(f"a batch of {batch} is not available: with --recipe paper choose one of {choices}")
    if recipe == "paper":
        if name not in SIZES:
            raise ValueError(f"the paper has no size {name!r}: choose one of {', '.join(SIZES)}")
        return _paper_scale(name, batch or PAPER_BATCHES[0])
    if name not in SCALES:
        raise ValueError(f"unknown scale {name!r}: choose one of smoke, {', '.join(SIZES)}")
    return SCALES[name]


def first_seeds(count: int) -> tuple[int, ...]:
    if not 1 <= count <= len(SEEDS):
        raise ValueError(f"there are 1 to {len(SEEDS)} seeds, not {count}")
    return SEEDS[:count]

"""Fine-tuning of a checkpoint on the tasks, over several seeds."""

from saobp.training.finetune.recipe import FinetuneRecipe, recipe_for
from saobp.training.finetune.run import checked_seeds, finetune

__all__ = ["FinetuneRecipe", "checked_seeds", "finetune", "recipe_for"]

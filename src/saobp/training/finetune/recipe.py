"""How a model is fine-tuned on each task.

The paper names no fine-tuning values but the seed, 42. These are the usual ones for compact BERTs: a learning
rate of 1e-4 with linear decay after 10 % warm-up, batches of 32, more epochs where there are few rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from saobp.data.tasks import TaskSpec, get_task
from saobp.refinement import check_count

SEEDS = (42,)


@dataclass(frozen=True)
class FinetuneRecipe:
    """Hyperparameters of a fine-tuning run, except the seed.

    length:   longest sequence in tokens; a model with fewer positions shortens it
    warmup: share of the steps
    strength_rate:    rate of learned strengths as a multiple of the others', as in pretraining
    evaluation_batch: rows at a time when predicting
    health_texts:     validation sequences whose attention is measured after each epoch; 0 for none
    question: SQuAD only, most tokens of a question; answer: most tokens of an answer
    compiled: whether torch.compile prepares the training step
    """

    task: str
    epochs: int = 3
    batch: int = 32
    rate: float = 1e-4
    warmup: float = 0.1
    decay: float = 0.01
    clip: float = 1.0
    length: int = 128
    strength_rate: float = 10.0
    evaluation_batch: int = 256
    health_texts: int = 32
    question: int = 64
    answer: int = 30
    compiled: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "evaluation_batch", "question", "answer"):
            check_count(name, getattr(self, name))
        if not isinstance(self.length, int) or self.length < 16:
            raise ValueError(f"length must be at least 16 tokens, not {self.length!r}")
        if not self.rate > 0 or not self.strength_rate > 0:
            raise ValueError(f"rates must be above 0, not {self.rate!r} and {self.strength_rate!r}")
        if self.health_texts < 0:
            raise ValueError(f"health_texts must be at least 0, not {self.health_texts!r}")
        if not 0 <= self.warmup < 1:
            raise ValueError(
                f"warmup is a share of the steps, from 0 up to but not including 1, not {self.warmup!r}"
            )
        if self.decay < 0 or self.clip <= 0:
            raise ValueError(
                f"decay must be at least 0 and clip above 0, not {self.decay!r} and {self.clip!r}"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FinetuneRecipe:
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


_OWN: dict[str, dict[str, Any]] = {
    "cola": {"epochs": 5},
    "mrpc": {"epochs": 5},
    "stsb": {"epochs": 5},
    "rte": {"epochs": 5, "length": 256},
    "wnli": {"epochs": 5},
    "qnli": {"length": 256},
    "boolq": {"epochs": 5, "length": 256},
    "squad": {"length": 384},
    "hellaswag": {"length": 192, "evaluation_batch": 128},
    "race-middle": {"length": 512, "evaluation_batch": 64},
}


def recipe_for(task: str | TaskSpec, **changes: Any) -> FinetuneRecipe:
    """The recipe of a task, with changes; a change of None is no change."""
    spec = task if isinstance(task, TaskSpec) else get_task(task)
    recipe = FinetuneRecipe(spec.name, **_OWN.get(spec.name, {}))
    return replace(recipe, **{name: value for name, value in changes.items() if value is not None})

"""Named sets of hyperparameters: everything about a pretraining run except paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from saobp.refinement import Refinement
from saobp.regularizers import Regularizer, regularizer
from saobp.sizes import DECODERS
from saobp.training.architectures import shape_of

PRECISIONS = ("fp32", "bf16")
SCHEDULES = ("linear", "cosine", "constant")
OPTIMIZERS = ("adamw", "muon")
OPTIONS = {"name": "recipe"} | {
    name: name for name in ("family", "size", "seed", "refinement", "regularizer", "corpus")
}
"""Fields with a command-line option of their own: other fields depend on them."""


@dataclass(frozen=True)
class PretrainRecipe:
    """Hyperparameters of a pretraining run.

    name:            the recipe it came from
    steps:           optimiser steps; batch_size rows of length tokens each, over all processes together
    stop_after:      steps after which a run ends although its learning rate is scheduled over ``steps``
    accumulation: micro-batches of a batch, to save memory
    optimizer: adamw, or muon for hidden matrices and AdamW for the rest
    muon_rate:       learning rate of hidden matrices under muon, as a multiple of the others'
    averaged_share:  share of the last steps whose weights are averaged, for evaluations and the model
    masked_share:    share of tokens to predict; it falls to masked_share_end, if there is one, step by step
    precision: bf16 computes in bfloat16 with float32 master weights
    compiled: whether to torch.compile the step
    strength_rate:   learning rate of learned strengths, as a multiple of the others'
    strength_delay:  share of the steps after which strengths begin to learn
    vocabulary_multiple: the vocabulary is padded to a multiple of it
    log_steps:       steps between lines of metrics; the other intervals are multiples of it
    evaluation_rows: held-out rows whose loss is taken, always the same with the same masks
    health_texts:    held-out texts whose attention is measured at each evaluation; 0 for none
    regularizer:     a penalty on attention, as in ``entropy,weight=1e-4``, or None
    corpus: the mixture as given by the user
    """

    name: str
    family: str
    size: str
    steps: int
    batch_size: int
    length: int
    learning_rate: float
    warmup_steps: int
    stop_after: int | None = None
    accumulation: int = 1
    schedule: str = "linear"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    clip: float = 1.0
    dropout: float = 0.1
    masked_share: float = 0.15
    masked_share_end: float | None = None
    optimizer: str = "adamw"
    muon_rate: float = 1.0
    averaged_share: float = 0.0
    precision: str = "bf16"
    compiled: bool = True
    refinement: Refinement | None = None
    strength_rate: float = 10.0
    strength_delay: float = 0.0
    regularizer: str | None = None
    vocabulary_multiple: int = 1
    seed: int = 42
    log_steps: int = 50
    evaluation_steps: int = 500
    checkpoint_steps: int = 1000
    evaluation_rows: int = 4096
    health_texts: int = 16
    corpus: str = ""

    def __post_init__(self) -> None:
        shape_of(self.family, self.size)
        if self.refinement is not None:
            object.__setattr__(self, "refinement", Refinement.of(self.refinement))
        object.__setattr__(self, "betas", tuple(self.betas))
        self.penalty()
        for name in ("steps", "batch_size", "accumulation", "log_steps", "vocabulary_multiple"):
            _check(name, getattr(self, name) >= 1, "at least 1", getattr(self, name))
        _check("length", self.length >= 2, "at least 2", self.length)
        rate = self.learning_rate
        _check("learning_rate", 0 < rate < float("inf"), "above 0 and finite", rate)
        _check("dropout", 0 <= self.dropout < 1, "from 0 up to but not including 1", self.dropout)
        _check("masked_share", 0 < self.masked_share < 1, "between 0 and 1", self.masked_share)
        end = self.masked_share if self.masked_share_end is None else self.masked_share_end
        _check("masked_share_end", 0 < end <= self.masked_share, "above 0 and at most masked_share", end)
        _check("optimizer", self.optimizer in OPTIMIZERS, " or ".join(OPTIMIZERS), self.optimizer)
        _check("strength_delay", 0 <= self.strength_delay < 1, "from 0 to below 1", self.strength_delay)
        _check("averaged_share", 0 <= self.averaged_share <= 1, "from 0 to 1", self.averaged_share)
        _check("precision", self.precision in PRECISIONS, " or ".join(PRECISIONS), self.precision)
        _check("schedule", self.schedule in SCHEDULES, " or ".join(SCHEDULES), self.schedule)
        _check("seed", 0 <= self.seed < 2**32, "from 0 up to but not including 2**32", self.seed)
        betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _check("betas", betas, "two numbers from 0 up to but not including 1", self.betas)
        for name in (
            *("warmup_steps", "health_texts", "evaluation_rows"),
            *("clip", "strength_rate", "muon_rate", "weight_decay", "epsilon"),
        ):
            _check(name, getattr(self, name) >= 0, "at least 0", getattr(self, name))
        _check(
            "warmup_steps", self.warmup_steps < self.steps, f"below the {self.steps} steps", self.warmup_steps
        )
        _check("stop_after", 1 <= self.last_step <= self.steps, f"from 1 to {self.steps}", self.stop_after)
        for name in ("evaluation_steps", "checkpoint_steps"):
            value = getattr(self, name)
            rule = f"a multiple of log_steps ({self.log_steps})"
            _check(name, value >= 1 and value % self.log_steps == 0, rule, value)

    def penalty(self) -> Regularizer | None:
        """A new instance of the regularizer."""
        return None if self.regularizer is None else regularizer(self.regularizer)

    def share_at(self, step: int) -> float:
        """The masked share of a step, counted from 0."""
        if self.masked_share_end is None:
            return self.masked_share
        return self.masked_share + (self.masked_share_end - self.masked_share) * step / self.steps

    @property
    def tokens(self) -> int:
        """The token budget."""
        return self.last_step * self.tokens_per_step

    @property
    def last_step(self) -> int:
        """Steps that a run takes."""
        return self.steps if self.stop_after is None else self.stop_after

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.length

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        plain = asdict(self)
        plain["betas"] = list(self.betas)
        plain["refinement"] = None if self.refinement is None else self.refinement.to_dict()
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PretrainRecipe:
        """Inverse of ``to_dict``; also reads a run's recipe.json."""
        values = {name: value for name, value in values.items() if name != "kind"}
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown recipe field {', '.join(unknown)}")
        return cls(**values)


def paper(family: str, size: str) -> PretrainRecipe:
    """The paper's steps, rate, schedule, warm-up and seed, for every size.

    Its batch size is the one unknown: it is not printed, and 32 x 128 fits the cost table.
    """
    by_size = {
        "mini": (60_000, 5e-5, 3000),
        "small": (150_000, 3e-4, 7500),
        "medium": (245_000, 3e-4, 12_000),
    }
    if size not in by_size:
        raise ValueError(f"the paper has no size {size!r}: choose mini, small or medium")
    steps, rate, warmup = by_size[size]
    intervals: dict[str, Any] = {"evaluation_steps": 1000, "checkpoint_steps": 2000, "evaluation_rows": 1024}
    intervals["health_texts"] = 0  # heads are measured afterwards
    return PretrainRecipe("paper", family, size, steps, 32, 128, rate, warmup, schedule="cosine", **intervals)


def fast(family: str, size: str) -> PretrainRecipe:
    """For one modern GPU: a batch of 256 x 128, a high rate, no dropout, a fixed token budget.

    262 million tokens for BERT-mini, twice and three times that for small and medium: too few for a model of
    these sizes to overfit, which is what dropout is for, and dropout costs time. GPT-2 has half of that: it
    predicts every token, not 15 % of them.
    """
    shape_of(family, size)
    by_size = {"tiny": (2000, 2e-3), "mini": (8000, 1e-3), "small": (16_000, 7e-4), "medium": (24_000, 5e-4)}
    if size not in by_size:
        raise ValueError(
            f"the recipes fast and modern have no size {size!r}: choose tiny, mini, small or medium"
        )
    steps, rate = by_size[size]
    if family in DECODERS:
        steps //= 2
    return PretrainRecipe(
        *("fast", family, size, steps, 256, 128, rate, steps // 20),
        betas=(0.9, 0.98),
        epsilon=1e-6,
        dropout=0.0,
        vocabulary_multiple=64,
    )


def modern(family: str, size: str) -> PretrainRecipe:
    """For comparing attention methods: ModernBERT or Llama, without a plateau.

    The token budget of the recipe fast, at four times its learning rate, with a masked share that falls from
    30 to 15 % (encoders alone have masks). Both were chosen on plain attention of the size mini, see
    docs/training.md. The rate of learned strengths stays.
    """
    if family not in ("modernbert", "llama"):
        raise ValueError(f"the recipe modern is for modernbert and llama, not {family}")
    base, masked = fast(family, size), family not in DECODERS
    return replace(
        base,
        name="modern",
        learning_rate=4 * base.learning_rate,
        strength_rate=base.strength_rate / 4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        masked_share=0.30 if masked else base.masked_share,
        masked_share_end=0.15 if masked else None,
    )


def tiny(family: str, size: str = "tiny") -> PretrainRecipe:
    """Seconds on a CPU: for tests, trials and the quickstart."""
    return PretrainRecipe(
        *("tiny", family, size, 200, 16, 32, 4e-3, 10),
        betas=(0.9, 0.98),
        dropout=0.0,
        precision="fp32",
        compiled=False,
        log_steps=10,
        evaluation_steps=50,
        checkpoint_steps=100,
        evaluation_rows=64,
    )


RECIPES: dict[str, Callable[[str, str], PretrainRecipe]] = {
    "paper": paper,
    "fast": fast,
    "modern": modern,
    "tiny": tiny,
}


def named_recipe(name: str, family: str, size: str) -> PretrainRecipe:
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: choose one of {', '.join(RECIPES)}")
    return RECIPES[name](family, size)


def with_steps(recipe: PretrainRecipe, steps: int) -> PretrainRecipe:
    """The recipe rescaled to so many steps: warm-up in proportion, and intervals that still fit."""
    _check("steps", steps >= 1, "at least 1", steps)
    share = min(1.0, steps / recipe.steps)
    log = max(1, min(recipe.log_steps, steps // 20))
    return replace(
        recipe,
        steps=steps,
        warmup_steps=recipe.warmup_steps * steps // recipe.steps,
        log_steps=log,
        evaluation_steps=max(log, int(recipe.evaluation_steps * share) // log * log),
        checkpoint_steps=max(log, int(recipe.checkpoint_steps * share) // log * log),
    )


def parse_override(text: str) -> tuple[str, Any]:
    """Read ``name=value`` for a field of a recipe."""
    name, equals, value = text.partition("=")
    kinds = {field.name: str(field.type) for field in fields(PretrainRecipe)}
    settable = [known for known in kinds if known not in OPTIONS]
    if not equals or name not in kinds:
        raise ValueError(f"cannot set {text!r}: write one of {', '.join(settable)}, then = and a value")
    if name in OPTIONS:
        raise ValueError(f"{name} is not for --set: write --{OPTIONS[name]} {value}")
    readers: dict[str, Callable[[str], Any]] = {
        "int": int,
        "int | None": lambda text: None if text == "none" else int(text),
        "float": float,
        "float | None": lambda text: None if text == "none" else float(text),
        "bool": _boolean,
        "tuple[float, float]": _pair,
    }
    try:
        return name, readers.get(kinds[name], str)(value)
    except (ValueError, KeyError):
        raise ValueError(f"{name} cannot be {value!r}: it is of type {kinds[name]}") from None


def _boolean(text: str) -> bool:
    return {"true": True, "yes": True, "false": False, "no": False}[text.lower()]


def _pair(text: str) -> tuple[float, float]:
    first, second = text.split(",")
    return float(first), float(second)


def _check(name: str, holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, not {value}")

"""A checkpoint with a fresh head for a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from saobp.data.tasks import TaskSpec
from saobp.refinement import Refinement
from saobp.training.checkpoints import config_of, load_model

_HEADS: dict[str, tuple[Any, str]] = {
    "classification": (AutoModelForSequenceClassification, "sequence classification"),
    "regression": (AutoModelForSequenceClassification, "sequence classification"),
    "choice": (AutoModelForMultipleChoice, "multiple choice"),
    "span": (AutoModelForQuestionAnswering, "question answering"),
}


def load_with_head(
    folder: str | Path,
    spec: TaskSpec,
    tokenizer: PreTrainedTokenizerFast,
    refinement: Refinement | None = None,
) -> PreTrainedModel:
    """A model in float32 with a new head for a task, refined as it was saved or as asked.

    ``refinement`` overrides the checkpoint's own; the factor ``none`` removes it.
    """
    config = config_of(folder)
    kind, words = _HEADS[spec.kind]
    if type(config) not in kind._model_mapping:
        raise ValueError(
            f"{spec.name} needs a head for {words}, which Transformers lacks for {config.model_type}"
        )
    options: dict[str, Any] = {}
    if spec.kind in ("classification", "regression"):
        options["num_labels"] = max(1, len(spec.labels))
        options["problem_type"] = "regression" if spec.kind == "regression" else "single_label_classification"
    model = load_model(folder, kind, refinement, **options)
    if model.config.pad_token_id is None:
        padding = tokenizer.pad_token_id
        model.config.pad_token_id = tokenizer.eos_token_id if padding is None else padding
    return model

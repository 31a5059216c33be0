"""Load saved models with tokenizer, refinement and the head of a task, for fine-tuning and evaluation."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from saobp.data.tasks import TaskSpec
from saobp.refinement import Refinement
from saobp.storage.model_folders import check_tokenizer, checked_folder
from saobp.transformers.apply import override_refinement
from saobp.transformers.input_length import max_input_length
from saobp.transformers.load_errors import clear_load_errors


def config_of(folder: str | Path) -> Any:
    """The config of a saved model."""
    name = checked_folder(folder)
    with clear_load_errors(name):
        return AutoConfig.from_pretrained(name)


def load_tokenizer_of(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved with a model."""
    name, config = checked_folder(folder), config_of(folder)
    check_tokenizer(name)
    with clear_load_errors(name, "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(name, config=config)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer in {str(folder)!r} is not a fast one, which saobp needs")
    return tokenizer


def load_model(
    folder: str | Path,
    kind: Any,
    refinement: Refinement | None = None,
    *,
    head_may_be_new: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """A model of a kind (an Auto class) in float32, refined as it was saved or as asked.

    ``refinement`` overrides the checkpoint's own; the factor ``none`` removes it.
    ``head_may_be_new``: whether weights that the checkpoint lacks may be random, to be trained.
    """
    name = checked_folder(folder)
    with clear_load_errors(name):
        model, info = kind.from_pretrained(
            name, output_loading_info=True, **{"dtype": torch.float32, **options}
        )
    if info["missing_keys"] and not head_may_be_new:
        raise ValueError(
            f"{str(folder)!r} lacks weights of {type(model).__name__}, such as {min(info['missing_keys'])}, "
            "and random ones would be measured: give a model that was saved with its language-model head"
        )
    return override_refinement(model, refinement)


def effective_refinement(folder: str | Path, refinement: Refinement | None) -> dict[str, Any] | None:
    """The refinement given, else the checkpoint's own; None for plain attention."""
    if refinement is not None:
        return None if refinement.is_plain else refinement.to_dict()
    return getattr(config_of(folder), "saobp", None)


def most_positions(folder: str | Path) -> int | None:
    """Maximum input length of a checkpoint in tokens, if its config has one."""
    with torch.device("meta"):
        return max_input_length(AutoModel.from_config(config_of(folder)))


def model_name(model: str | Path) -> str:
    """A hub name unchanged, a folder by its last two parts: records contain no absolute paths."""
    return "/".join(Path(model).absolute().parts[-2:]) if Path(model).exists() else str(model)


def model_checksum(folder: str | Path) -> str:
    """SHA-256 over the weights of a checkpoint folder; a hub name unchanged."""
    path = Path(checked_folder(folder))
    digest = hashlib.sha256(b"" if path.is_dir() else str(folder).encode())
    names = sorted(file for file in path.glob("*") if file.suffix in (".safetensors", ".bin"))
    for file in names:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


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

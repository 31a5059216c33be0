"""Models and texts for a diagnosis, from folders, files or the hub, and a built-in model with known heads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForTextEncoding,
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from saobp.refinement import Refinement
from saobp.storage.atomic import first_line
from saobp.storage.model_folders import check_file, check_tokenizer, intact_folder
from saobp.transformers.apply import override_refinement
from saobp.transformers.load_errors import clear_load_errors

ENCODER_ALONE = {"mt5", "t5", "umt5"}
"""Types of models whose encoder is loaded, since their decoder needs a text of its own."""
EXAMPLE = "synthetic example"
EXAMPLE_TEXT = (
    "Each head of this model attends by position. The first attends to all alike, the second to itself, "
    "the third to the first token, the fourth one token back; the fifth sends each third to the next."
)


def load_model(
    name: str, refinement: Refinement | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer from its folder, its run's folder or the hub, refined as saved or given."""
    if name == EXAMPLE:
        model, tokenizer = example_model()
    else:
        model, tokenizer = _from_pretrained(name)
    override_refinement(model, refinement)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), tokenizer


def is_refinement(text: str) -> bool:
    """Whether ``text`` is the written form of a refinement, right or wrong, rather than a model's name."""
    if Path(text).exists():
        return False
    if ":" in text:  # not allowed in hub names
        return True
    try:
        Refinement.parse(text)
    except ValueError:
        return False
    return True


def read_texts(path: Path, limit: int) -> list[str]:
    """Texts of a file, split at blank lines, or at line ends if it has none."""
    check_file(path)
    try:
        whole = path.read_text(encoding="utf-8-sig")  # without the mark that some editors begin with
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not text in UTF-8") from None
    parts = re.split(r"\n\s*\n", whole.replace("\r\n", "\n"))
    if len([part for part in parts if part.strip()]) < 2:
        parts = whole.splitlines()
    return _non_empty(parts, limit, f"{str(path)!r}")


def dataset_texts(name: str, split: str, column: str | None, limit: int) -> list[str]:
    """Texts of a column of a dataset, by default the first column of strings."""
    import datasets

    try:
        data = datasets.load_dataset(name, split=split, streaming=True)
        rows = list(data.take(limit))
    except Exception as problem:
        raise ValueError(f"cannot read split {split!r} of dataset {name!r}: {first_line(problem)}") from None
    strings = [key for key, value in rows[0].items() if isinstance(value, str)] if rows else []
    if column is None and strings:
        column = strings[0]
    if column not in strings:
        known = ", ".join(strings) or "none"
        raise ValueError(f"dataset {name!r} has no column of text called {column!r}: it has {known}")
    return _non_empty([row[column] for row in rows], limit, f"column {column!r} of {name!r}")


def _from_pretrained(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = intact_folder(name)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()
    with clear_load_errors(folder, "a model with its tokenizer"):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        tokenizer("")  # a damaged one may load and fail here
    if tokenizer.vocab_files_names:  # tokenizers of bytes or characters have no files
        check_tokenizer(folder)
    with clear_load_errors(folder, "a model with its tokenizer"):
        config = AutoConfig.from_pretrained(folder)
        kind = AutoModelForTextEncoding if config.model_type in ENCODER_ALONE else AutoModel
        model: Any = kind.from_pretrained(folder)
    return model, tokenizer


def _non_empty(texts: Iterable[str], limit: int, where: str) -> list[str]:
    stripped = [text.strip() for text in texts if text.strip()]
    if not stripped:
        raise ValueError(f"{where} holds no text")
    return stripped[:limit]


LENGTH, SHARPNESS = 48, 200.0
PLANTED = ("uniform", "diagonal", "first token", "previous token", "two-hop pointer")
"""Heads in order. The pointer attends from each token to those whose position modulo three is one more."""


def example_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with synthetic heads and a tokenizer that splits words at spaces."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return planted_model(), PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )


def planted_model() -> BertModel:
    """A BERT of one layer that attends by position alone, for texts of up to 48 tokens.

    Position vectors are one-hot; layer normalisation turns them into a multiple of themselves minus a
    constant, which the biases cancel.
    """
    heads = len(PLANTED)
    config = BertConfig(
        vocab_size=256,
        hidden_size=heads * LENGTH,
        num_hidden_layers=1,
        num_attention_heads=heads,
        intermediate_size=8,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    embeddings, layer = model.embeddings, model.encoder.layer[0].attention.self
    queries, keys = _patterns()
    with torch.no_grad():
        embeddings.word_embeddings.weight.zero_()
        embeddings.token_type_embeddings.weight.zero_()
        embeddings.position_embeddings.weight.copy_(torch.eye(LENGTH, config.hidden_size))
        states = embeddings.LayerNorm(embeddings.position_embeddings.weight)
        constant, peak = states[0, -1], states[0, 0] - states[0, -1]
        for part, wanted in ((layer.query, SHARPNESS * queries), (layer.key, keys)):
            part.weight.zero_()
            part.weight[:, :LENGTH] = wanted.flatten(1).T / peak
            part.bias.copy_(-constant * part.weight.sum(1))
    return model


def _patterns() -> tuple[Tensor, Tensor]:
    """Query and key of each position in each head, ``[positions, heads, dim]``; a score is their product."""
    queries, keys = torch.zeros(2, LENGTH, len(PLANTED), LENGTH)
    one_hot = torch.eye(LENGTH)
    third = torch.arange(LENGTH) % 3
    queries[:, 1] = keys[:, 1] = keys[:, 2] = keys[:, 3] = one_hot
    queries[:, 2, 0] = 1
    queries[:, 3] = one_hot[[0, *range(LENGTH - 1)]]
    queries[:, 4] = functional.one_hot((third + 1) % 3, LENGTH)
    keys[:, 4] = functional.one_hot(third, LENGTH)
    return queries, keys

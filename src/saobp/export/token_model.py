"""A model of tokens that can be exported: its class, its inputs and outputs, a forward of tensors alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from saobp.refinement import Refinement
from saobp.storage.model_folders import has_tokenizer, intact_folder
from saobp.transformers.apply import override_refinement
from saobp.transformers.input_length import max_input_length
from saobp.transformers.load import saved_class
from saobp.transformers.load_errors import clear_load_errors

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
MOST_ROWS = 4096
"""Upper bound of the batch of an exported program."""


@dataclass(frozen=True)
class TokenModel:
    """A model in float32, ready to be exported.

    inputs, outputs: names, in order; inputs are int64 ``[batch, length]``
    longest:         number of positions that the model knows
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    longest: int

    @property
    def forward(self) -> Forward:
        return Forward(self.model, self.inputs, self.outputs).eval()

    @property
    def refinement(self) -> dict[str, Any] | None:
        written: dict[str, Any] | None = getattr(self.model.config, "saobp", None)
        return written

    def batch(self, rows: int, length: int, *, padding: bool = True) -> tuple[Tensor, ...]:
        """Random tokens; with padding, each row is one token shorter than the one before, down to two."""
        generator = torch.Generator().manual_seed(rows * length)
        tokens = torch.randint(0, self.model.config.vocab_size, (rows, length), generator=generator)
        mask = torch.ones_like(tokens)
        for row in range(rows if padding else 0):
            mask[row, max(2, length - row) :] = 0
        encoded = {
            "input_ids": tokens,
            "attention_mask": mask,
            "token_type_ids": torch.zeros_like(tokens),
        }
        return tuple(encoded[name] for name in self.inputs)


class Forward(nn.Module):
    """A model's forward from tensors to a tuple of tensors, without a cache."""

    def __init__(self, model: PreTrainedModel, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs
        parameters = inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in parameters or model.can_generate() else {}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.inputs, tensors, strict=True))
        result = self.model(**given, **self.options)
        return tuple(result[name] for name in self.outputs)


def load_token_model(name: str, refinement: Refinement | None = None) -> TokenModel:
    """A model from its folder, its run's folder or the hub, with the head it was saved with.

    ``refinement`` overrides the one that it was saved with; the factor ``none`` removes it.
    Raises on what cannot be exported.
    """
    folder = intact_folder(name)
    with clear_load_errors(folder, "a model"):
        model: Any = saved_class(AutoConfig.from_pretrained(folder), folder).from_pretrained(folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder) if has_tokenizer(folder) else None
    return token_model(override_refinement(model, refinement), tokenizer, name)


def token_model(model: PreTrainedModel, tokenizer: Any = None, name: str = "the model") -> TokenModel:
    """A loaded model. Raises on what cannot be exported."""
    check_exportable(model)
    model = model.float().cpu().eval()
    accepted = inspect.signature(model.forward).parameters
    wanted = INPUTS if tokenizer is None else tuple(tokenizer.model_input_names)
    inputs = tuple(one for one in INPUTS if one in accepted and (one in wanted or one == "attention_mask"))
    longest = max_input_length(model) or 512
    found = TokenModel(name, model, tokenizer, inputs, (), longest)
    with torch.no_grad():
        tensors = dict(zip(inputs, found.batch(2, 4), strict=True))
        result = model(**tensors, **found.forward.options)
    outputs = tuple(key for key, value in result.items() if isinstance(value, Tensor))
    return TokenModel(name, model, tokenizer, inputs, outputs, longest)


def check_exportable(model: PreTrainedModel) -> None:
    """Raises for a model whose export would not mean anything, or that takes other things than tokens."""
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{kind} is an encoder with a decoder, which take turns: saobp export writes a single network"
        )
    if model.main_input_name != "input_ids":
        raise ValueError(f"{kind} takes {model.main_input_name}: saobp export writes models of tokens")
    written = getattr(model.config, "saobp", None)
    if written is not None and written.get("future") == "paper" and model.can_generate():
        raise ValueError(
            "future='paper' lets rows receive messages of later rows, which do not exist yet while a text is "
            "generated, so an exported decoder would give other numbers than it was trained with: train or "
            "apply a refinement with future='strict'"
        )

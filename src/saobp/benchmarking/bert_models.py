"""The paper's BERT sizes with random weights."""

from __future__ import annotations

from typing import TypeVar

import torch
from transformers import BertConfig, PreTrainedModel

from saobp.sizes import Size
from saobp.transformers.apply import apply

VOCABULARY, MASK = 30522, 103

Model = TypeVar("Model", bound=PreTrainedModel)


REFINEMENTS = {"original": None, "high": "high", "learned": "high,strength=learned"}
"""Version of a model to the refinement applied to it; ``original`` is Transformers' own SDPA attention."""


def bert(kind: type[Model], size: Size, version: str, *, vocabulary: int = VOCABULARY) -> Model:
    """A BERT of a kind (a Transformers class) in evaluation mode, refined as its version says."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.ffn,
    )
    model = kind(config).eval()
    model.set_attn_implementation("sdpa")
    refinement = REFINEMENTS[version]
    return model if refinement is None else apply(model, refinement)

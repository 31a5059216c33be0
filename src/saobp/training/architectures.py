"""Randomly initialised models: BERT, GPT-2, ModernBERT and Llama in the paper's sizes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
)

from saobp.sizes import PAPER_SIZES, Size

_CLASSES: dict[str, tuple[Any, Any]] = {
    "bert": (BertConfig, BertForMaskedLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
    "modernbert": (ModernBertConfig, ModernBertForMaskedLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
_DROPOUT = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    "modernbert": ("embedding_dropout", "attention_dropout", "mlp_dropout"),
    "llama": ("attention_dropout",),
}
FAMILIES = tuple(_CLASSES)
SIZES: dict[str, Size] = {"tiny": Size(2, 64, 4, 128), "micro": Size(3, 96, 4, 192), **PAPER_SIZES}
"""The paper's three, and two for tests and laptops."""
POSITIONS = 512
"""Minimum number of positions, so that models can be fine-tuned on longer inputs."""


def build_model(
    family: str,
    size: str,
    *,
    vocabulary: int,
    length: int,
    dropout: float = 0.1,
    multiple: int = 1,
    padding: int | None = None,
    seed: int | None = None,
) -> PreTrainedModel:
    """A model with random weights for ``length`` tokens of a vocabulary.

    dropout is that of hidden states and attention rows alike. ``multiple`` pads the vocabulary to a multiple,
    because odd matrix widths are slow on GPUs; the extra tokens never occur.
    ``padding`` is the tokenizer's padding token, if it has one.
    """
    shape = shape_of(family, size)
    if vocabulary < 1 or length < 2:
        raise ValueError(
            f"a model needs a vocabulary and at least 2 positions, not {vocabulary} and {length}"
        )
    if seed is not None:
        torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": -(-vocabulary // multiple) * multiple,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": max(length, POSITIONS),
        "n_inner" if family == "gpt2" else "intermediate_size": shape.ffn,
        **dict.fromkeys(_DROPOUT[family], dropout),
    }
    if family in ("gpt2", "llama"):
        options |= dict.fromkeys(("bos_token_id", "eos_token_id"), vocabulary - 1)
    else:
        options["pad_token_id"] = padding
    if family == "modernbert":
        options |= _modernbert_options(shape)
    elif family == "llama":
        options |= {"num_key_value_heads": shape.heads, "tie_word_embeddings": True}
    config, model = _CLASSES[family]
    built = model(config(**options))
    if family == "llama":
        _initialise_llama(built, shape.layers)
    return built


def _modernbert_options(shape: Size) -> dict[str, Any]:
    """Norms before each part and rotary positions, every layer global: learns sooner than BERT.

    The initialisation preserves the scale of activations, so that heads differ early.
    """
    absent = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
    return {
        **absent,
        "layer_types": ["full_attention"] * shape.layers,
        "initializer_range": shape.hidden**-0.5,
        "initializer_cutoff_factor": 3.0,
    }


def _initialise_llama(model: PreTrainedModel, layers: int) -> None:
    """ModernBERT's initialisation, for its counterpart as a decoder."""
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            if parameter.ndim == 2 and parameter.device.type != "meta":
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                share = 2 * layers if writes else 1  # of what all layers add up to
                parameter.normal_(std=(share * parameter.shape[1]) ** -0.5)


def shape_of(family: str, size: str) -> Size:
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}: choose {' or '.join(FAMILIES)}")
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}")
    return SIZES[size]

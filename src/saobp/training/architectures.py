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

FAMILIES = ("bert", "gpt2", "modernbert", "llama")
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
    common: dict[str, Any] = {
        "vocab_size": -(-vocabulary // multiple) * multiple,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": max(length, POSITIONS),
    }
    ends: dict[str, Any] = {"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1}
    if family == "bert":
        rates: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = BertConfig(**common, **rates, intermediate_size=shape.ffn, pad_token_id=padding)
        return BertForMaskedLM(config)
    if family == "modernbert":
        return _modernbert(shape, common, dropout, padding)
    if family == "llama":
        return _llama(shape, common | ends, dropout)
    rates = {"embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**common, **rates, **ends, n_inner=shape.ffn))


def _modernbert(shape: Size, common: dict[str, Any], dropout: float, padding: int | None) -> PreTrainedModel:
    """Norms before each part and rotary positions, every layer global: learns sooner than BERT.

    The initialisation preserves the scale of activations, so that heads differ early.
    """
    absent: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
    config = ModernBertConfig(
        **common,
        **absent,
        intermediate_size=shape.ffn,
        layer_types=["full_attention"] * shape.layers,
        initializer_range=shape.hidden**-0.5,
        initializer_cutoff_factor=3.0,
        embedding_dropout=dropout,
        attention_dropout=dropout,
        mlp_dropout=dropout,
        pad_token_id=padding,
    )
    return ModernBertForMaskedLM(config)


def _llama(shape: Size, common: dict[str, Any], dropout: float) -> PreTrainedModel:
    """ModernBERT's counterpart as a decoder, with tied embeddings as in the other models."""
    config = LlamaConfig(
        **common,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.ffn,
        attention_dropout=dropout,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            if parameter.ndim == 2 and parameter.device.type != "meta":
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                share = 2 * shape.layers if writes else 1  # of what all layers add up to
                parameter.normal_(std=(share * parameter.shape[1]) ** -0.5)
    return model


def shape_of(family: str, size: str) -> Size:
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}: choose {' or '.join(FAMILIES)}")
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}")
    return SIZES[size]

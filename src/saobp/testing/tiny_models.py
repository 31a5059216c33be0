"""Tiny models of every family that the plug-in is tested with: random weights, no download, milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

VOCABULARY, PADDING, WINDOW = 64, 0, 4
WIDTH, HEADS, LAYERS = 32, 4, 2

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 64,
    "pad_token_id": PADDING,
    "initializer_range": 0.3,
}
_DECODER: dict[str, Any] = {**_SHAPE, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


def _bert(**options: Any) -> PreTrainedModel:
    return BertForMaskedLM(BertConfig(**{**_SHAPE, **options}))


def _roberta(**options: Any) -> PreTrainedModel:
    return RobertaForMaskedLM(RobertaConfig(**{**_SHAPE, "max_position_embeddings": 66, **options}))


def _electra(**options: Any) -> PreTrainedModel:
    return ElectraForMaskedLM(ElectraConfig(**{**_SHAPE, "embedding_size": 16, **options}))


def _albert(**options: Any) -> PreTrainedModel:
    return AlbertForMaskedLM(AlbertConfig(**{**_SHAPE, "embedding_size": 16, **options}))


def _distilbert(**options: Any) -> PreTrainedModel:
    shape = {
        "vocab_size": VOCABULARY,
        "dim": WIDTH,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "hidden_dim": 2 * WIDTH,
        "max_position_embeddings": 64,
        "pad_token_id": PADDING,
        "initializer_range": 0.3,
    }
    return DistilBertForMaskedLM(DistilBertConfig(**{**shape, **options}))


def _modernbert(**options: Any) -> PreTrainedModel:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    local = {"local_attention": WINDOW, "global_attn_every_n_layers": 2}
    return ModernBertForMaskedLM(ModernBertConfig(**{**_SHAPE, **tokens, **local, **options}))


def _gpt2(**options: Any) -> PreTrainedModel:
    shape = {
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": PADDING,
        "initializer_range": 0.3,
    }
    return GPT2LMHeadModel(GPT2Config(**{**shape, **options}))


def _llama(**options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_DECODER, **options}))


def _mistral(**options: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**_DECODER, "sliding_window": WINDOW, **options}))


def _qwen3(**options: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**_DECODER, "head_dim": 16, **options}))


ENCODERS: dict[str, Callable[..., PreTrainedModel]] = {
    "bert": _bert,
    "roberta": _roberta,
    "distilbert": _distilbert,
    "electra": _electra,
    "albert": _albert,
    "modernbert": _modernbert,
}
DECODERS: dict[str, Callable[..., PreTrainedModel]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen3": _qwen3,
}
FAMILIES = {**ENCODERS, **DECODERS}


def tiny_model(family: str, *, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A random model of two layers and four heads, in evaluation mode; ``options`` go to its config.

    Weights are large, so that attention is far from uniform and a wrong mask or message is detected.
    """
    torch.manual_seed(seed)
    return FAMILIES[family](**options).eval()


def tiny_batch(
    batch: int = 2, length: int = 9, padding: int = 3, *, side: str = "right", seed: int = 0
) -> dict[str, Tensor]:
    """Token ids and a mask; all rows but the first have ``padding`` tokens of padding on one side."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    hidden = slice(length - padding, length) if side == "right" else slice(0, padding)
    ids[1:, hidden], mask[1:, hidden] = PADDING, 0
    return {"input_ids": ids, "attention_mask": mask}

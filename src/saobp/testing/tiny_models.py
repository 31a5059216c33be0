"""Tiny models of every family that the plug-in is tested with: random weights, no download, milliseconds."""

from __future__ import annotations

import functools
import random
from pathlib import Path
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
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from saobp.data.tokenizers import train_vocabulary
from saobp.lab.synthetic_tasks import COLOURS, NOUNS, SIGNS, VERBS, sentence
from saobp.transformers.apply import apply

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
_DISTILBERT: dict[str, Any] = {**_SHAPE, "hidden_dim": 2 * WIDTH}
_MODERNBERT: dict[str, Any] = {
    **_SHAPE,
    **{"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    **{"local_attention": WINDOW, "global_attn_every_n_layers": 2},
}
_GPT2: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PADDING, "initializer_range": 0.3},
}

ENCODERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (BertForMaskedLM, BertConfig, _SHAPE),
    "roberta": (RobertaForMaskedLM, RobertaConfig, {**_SHAPE, "max_position_embeddings": 66}),
    "distilbert": (DistilBertForMaskedLM, DistilBertConfig, _DISTILBERT),
    "electra": (ElectraForMaskedLM, ElectraConfig, {**_SHAPE, "embedding_size": 16}),
    "albert": (AlbertForMaskedLM, AlbertConfig, {**_SHAPE, "embedding_size": 16}),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig, _MODERNBERT),
}
DECODERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, _GPT2),
    "llama": (LlamaForCausalLM, LlamaConfig, _DECODER),
    "mistral": (MistralForCausalLM, MistralConfig, {**_DECODER, "sliding_window": WINDOW}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_DECODER, "head_dim": 16}),
}
FAMILIES = {**ENCODERS, **DECODERS}
"""By name: the class of the model, that of its config, and the config's fields."""


def tiny_model(family: str, *, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A random model of two layers and four heads, in evaluation mode; ``options`` go to its config.

    Weights are large, so that attention is far from uniform and a wrong mask or message is detected.
    """
    torch.manual_seed(seed)
    model, config, fields = FAMILIES[family]
    return model(config(**{**fields, **options})).eval()


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


@functools.cache
def tiny_tokenizer(kind: str = "wordpiece") -> PreTrainedTokenizerFast:
    """A tokenizer that knows the words of the synthetic tasks."""
    draw = random.Random(0)
    texts = [sentence(draw) for _ in range(50)]
    texts += [
        " ".join(
            [*SIGNS, *COLOURS, *NOUNS, *VERBS, "What is it like? One can say that Question: Answer: yes no"]
        )
    ]
    return train_vocabulary(texts, size=300, kind=kind)


def save_tiny_bert(
    folder: Path, refinement: str | None = None, *, positions: int = 64, spread: float = 0.02
) -> Path:
    """A small masked language model with random weights of a given spread, and its tokenizer."""
    tokenizer = tiny_tokenizer("wordpiece")
    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=positions, pad_token_id=tokenizer.pad_token_id,
            initializer_range=spread,
        )
    )  # fmt: skip
    return _save(model, tokenizer, folder, refinement)


def save_tiny_gpt2(folder: Path, refinement: str | None = None) -> Path:
    """A small decoder with random weights, large enough to tell candidates apart, and its tokenizer."""
    tokenizer = tiny_tokenizer("bpe")
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64,
            bos_token_id=end, eos_token_id=end, initializer_range=0.2,
        )
    )  # fmt: skip
    return _save(model, tokenizer, folder, refinement)


def _save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path, refinement: str | None) -> Path:
    if refinement is not None:
        apply(model, refinement)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

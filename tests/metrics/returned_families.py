"""Tiny random models whose attention does not go through Transformers' registry, or not in the usual form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BigBirdConfig,
    BigBirdForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    DebertaConfig,
    DebertaForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    FalconConfig,
    FalconForCausalLM,
    FSMTConfig,
    FSMTForConditionalGeneration,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    PreTrainedModel,
    RemBertConfig,
    RemBertForMaskedLM,
    RoFormerConfig,
    RoFormerForMaskedLM,
    SqueezeBertConfig,
    SqueezeBertForMaskedLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from saobp.testing.tiny_models import tiny_batch

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
SHORT: dict[str, Any] = {
    "vocab_size": 64,
    "n_layer": 2,
    "n_head": 4,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

ENCODERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "deberta": (DebertaForMaskedLM, DebertaConfig, {**SHAPE, **RELATIVE}),
    "deberta-v2": (DebertaV2ForMaskedLM, DebertaV2Config, {**SHAPE, **RELATIVE}),
    "roformer": (RoFormerForMaskedLM, RoFormerConfig, {**SHAPE, "embedding_size": 32}),
    "squeezebert": (SqueezeBertForMaskedLM, SqueezeBertConfig, {**SHAPE, "embedding_size": 32}),
    "rembert": (
        RemBertForMaskedLM,
        RemBertConfig,
        {**SHAPE, "input_embedding_size": 32, "output_embedding_size": 32},
    ),
    "megatron-bert": (MegatronBertForMaskedLM, MegatronBertConfig, SHAPE),
    "big-bird": (BigBirdForMaskedLM, BigBirdConfig, {**SHAPE, "attention_type": "original_full"}),
    "xlnet": (
        XLNetLMHeadModel,
        XLNetConfig,
        {**SHORT, "d_model": 32, "d_inner": 64},
    ),
}
DECODERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bloom": (BloomForCausalLM, BloomConfig, {**SHORT, "hidden_size": 32, "attention_dropout": 0.2}),
    "falcon": (FalconForCausalLM, FalconConfig, SHAPE),
    "falcon-alibi": (
        FalconForCausalLM,
        FalconConfig,
        {**SHAPE, "alibi": True, "attn_implementation": "eager"},
    ),
    "gptj": (GPTJForCausalLM, GPTJConfig, {**SHORT, "n_embd": 32, "rotary_dim": 8, "attn_pdrop": 0.2}),
    "gpt-neo": (
        GPTNeoForCausalLM,
        GPTNeoConfig,
        {
            **{
                "vocab_size": 64,
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "initializer_range": 0.3,
            },
            **{"attention_types": [[["global", "local"], 1]], "window_size": 80, "attention_dropout": 0.2},
        },
    ),
}
FAMILIES = {**ENCODERS, **DECODERS}


def tiny(family: str, **options: Any) -> PreTrainedModel:
    """In evaluation mode."""
    model, config, fields = FAMILIES[family]
    torch.manual_seed(0)
    made: PreTrainedModel = model(config(**{**fields, **options})).eval()
    return made


def translator() -> PreTrainedModel:
    """An encoder and a decoder."""
    sizes = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "d_model": 32,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    config = FSMTConfig(
        langs=["en", "de"],
        src_vocab_size=64,
        tgt_vocab_size=64,
        pad_token_id=1,
        init_std=0.3,
        **sizes,
        **heads,
    )
    torch.manual_seed(0)
    return FSMTForConditionalGeneration(config).eval()


def maps_of(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """What the model returns, layer by layer, without saobp."""
    config = model.config
    before, config._attn_implementation_internal = config._attn_implementation, "eager"
    with torch.no_grad():
        found = model(**batch, output_attentions=True, return_dict=True).attentions
    config._attn_implementation_internal = before
    return [rows.softmax(-1) for rows in found] if config.model_type == "squeezebert" else list(found)


def mean_over_texts(statistic: Callable[[Tensor], Tensor], rows: Tensor, mask: Tensor) -> Tensor:
    """Of maps ``[texts, heads, length, length]`` freed of their padding: ``[heads]``."""
    values = []
    for own, real in zip(rows, mask.bool(), strict=True):
        values.append(statistic(own[:, real][..., real][None])[0])
    return torch.stack(values).mean(0)


def batch_for(family: str, **options: Any) -> dict[str, Tensor]:
    return tiny_batch(side="left" if family in DECODERS else "right", **options)

"""A model with planted heads, whose statistics are known beforehand: the example of ``saobp diagnose``."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

LENGTH, SHARPNESS = 48, 200.0
PLANTED = ("uniform", "diagonal", "first token", "previous token", "two-hop pointer")
"""Heads in order. The pointer attends from each token to those whose position modulo three is one more."""


def example_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with planted heads and a tokenizer that splits words at spaces."""
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

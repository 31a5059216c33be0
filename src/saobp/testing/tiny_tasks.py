"""A tokenizer and tiny models that go with the synthetic tasks."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from saobp.data.tokenizers import train_vocabulary
from saobp.lab.synthetic_tasks import COLOURS, NOUNS, SIGNS, VERBS, sentence
from saobp.transformers.apply import apply


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
    folder: Path, refinement: str | None = None, *, positions: int = 64, spread: float = 0.02, seed: int = 0
) -> Path:
    """A small masked language model with random weights of a given spread, and its tokenizer."""
    tokenizer = tiny_tokenizer("wordpiece")
    torch.manual_seed(seed)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=positions, pad_token_id=tokenizer.pad_token_id,
            initializer_range=spread,
        )
    )  # fmt: skip
    return _save(model, tokenizer, folder, refinement)


def save_tiny_gpt2(folder: Path, refinement: str | None = None, *, seed: int = 0) -> Path:
    """A small decoder with random weights, large enough to tell candidates apart, and its tokenizer."""
    tokenizer = tiny_tokenizer("bpe")
    torch.manual_seed(seed)
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

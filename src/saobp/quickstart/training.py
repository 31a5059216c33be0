"""A tiny masked language model and its tokenizer, trained from nothing in about a minute on two cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 1024
LENGTH = 32
BATCH = 32
RATE = 4e-3
WARM_UP = 0.05
MASKED_SHARE = 0.15
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PADDING, UNKNOWN, START, END, MASK = range(len(SPECIAL))
IGNORED = -100


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer of lower-case English."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", START), ("[SEP]", END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LENGTH,
        pad_token=SPECIAL[PADDING],
        unk_token=SPECIAL[UNKNOWN],
        cls_token=SPECIAL[START],
        sep_token=SPECIAL[END],
        mask_token=SPECIAL[MASK],
    )


def pack(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """Texts one after the other, cut into lines of tokens that start with [CLS]: ``[lines, LENGTH]``."""
    encoded = tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
    stream = torch.tensor([token for one in encoded for token in (*one.ids, END)])
    lines = stream[: len(stream) // (LENGTH - 1) * (LENGTH - 1)].view(-1, LENGTH - 1)
    return torch.cat([torch.full((len(lines), 1), START), lines], 1)


def new_model() -> ModernBertForMaskedLM:
    """Three layers of four heads, all of them global; wide initial weights, so that heads differ early."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "global_attn_every_n_layers": 1,
        "max_position_embeddings": LENGTH,
        "initializer_range": 0.1,
        "initializer_cutoff_factor": 3.0,
        "pad_token_id": PADDING,
        "cls_token_id": START,
        "bos_token_id": START,
        "sep_token_id": END,
        "eos_token_id": END,
        "sparse_prediction": True,
    }
    return ModernBertForMaskedLM(ModernBertConfig(**shape))


def train(
    model: PreTrainedModel,
    lines: Tensor,
    *,
    steps: int,
    seconds: float,
    progress: Callable[[float, float], object] = lambda *_: None,
) -> int:
    """Train until ``steps`` or ``seconds`` are used up, whichever is first; returns the steps taken.

    ``progress`` is told the share done and the loss. The rate falls to zero at the end either way.
    """
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    start = time.monotonic()
    step = 0
    while (done := max(step / steps, (time.monotonic() - start) / seconds)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (done + 1 / steps) / WARM_UP) * (1 - done)
        batch = lines[torch.randint(len(lines), (BATCH,), generator=generator)]
        loss = model(**masked(batch, generator)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        progress(done, float(loss.detach()))
    model.eval()
    return step


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, lines: Tensor) -> float:
    """Mean loss in nats of masked tokens, the same ones each time."""
    return float(model(**masked(lines, torch.Generator().manual_seed(1))).loss)


def masked(lines: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Hide some of the ordinary tokens and ask for them."""
    hidden = (torch.rand(lines.shape, generator=generator) < MASKED_SHARE) & (lines > MASK)
    return {
        "input_ids": lines.masked_fill(hidden, MASK),
        "attention_mask": torch.ones_like(lines),
        "labels": lines.masked_fill(~hidden, IGNORED),
    }

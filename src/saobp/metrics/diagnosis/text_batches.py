"""Texts as batches of token ids for a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.transformers.input_length import max_input_length

CHARACTERS_PER_TOKEN = 32
"""Upper bound on characters per token, so that long texts are cut before they are tokenised."""

Note = Callable[[str], object]
"""Takes a sentence that a reader should know."""


def encode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    length: int | None,
    subject: str,
    note: Note,
) -> list[Tensor]:
    """Token ids of each text, the longest first, cut to ``length`` or to what the model takes."""
    limit = max_input_length(model)
    if length is not None and (length < 2 or (limit is not None and length > limit)):
        reach = "" if limit is None else f" and at most {limit}, the reach of the model"
        raise ValueError(f"texts can be cut to at least 2 tokens{reach}, not to {length}")
    max_length = limit if length is None else length
    if max_length is not None:
        texts = [text[: CHARACTERS_PER_TOKEN * (max_length + 1)] for text in texts]
    ids = [_ids(tokenizer, text, None if max_length is None else max_length + 1) for text in texts]
    if max_length is not None:
        cut = sum(len(text_ids) > max_length for text_ids in ids)
        if cut and length is None:
            verb = "is" if cut == 1 else "are"
            note(
                f"{cut} of {len(ids)} texts {verb} cut to {max_length} tokens, the most that {subject} takes"
            )
        ids = [
            text_ids if len(text_ids) <= max_length else _ids(tokenizer, text, max_length)
            for text, text_ids in zip(texts, ids, strict=True)
        ]
    usable = [text_ids for text_ids in ids if len(text_ids) > 1]
    if not usable:
        raise ValueError("the texts hold no more than a token each, so there is no attention to look at")
    if len(usable) < len(ids):
        short, few = len(ids) - len(usable), "fewer than two tokens"
        verbs = f"has {few} and is" if short == 1 else f"have {few} and are"
        note(f"{short} of {len(ids)} texts {verbs} left out")
    _check_vocabulary(model, usable, subject)
    if tokenizer.pad_token_id is None and len({len(text_ids) for text_ids in usable}) > 1:
        note(
            "the tokenizer has no padding token: in a batch, shorter texts are filled up with another, masked"
        )
    return sorted(usable, key=len, reverse=True)


def batches(encoded: Sequence[Tensor], size: int, padding: int) -> Iterator[dict[str, Tensor]]:
    """Model inputs of ``size`` texts at a time; the first, longest text comes alone, to estimate the time."""
    for batch in ([encoded[0:1]] if encoded else []) + [
        encoded[start : start + size] for start in range(1, len(encoded), size)
    ]:
        ids = nn.utils.rnn.pad_sequence(list(batch), batch_first=True, padding_value=padding)
        lengths = torch.tensor([len(text) for text in batch])
        yield {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, or any other, since padding is masked."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int | None) -> Tensor:
    return torch.tensor(
        tokenizer(text, truncation=max_length is not None, max_length=max_length)["input_ids"]
    )


def _check_vocabulary(model: PreTrainedModel, encoded: Sequence[Tensor], subject: str) -> None:
    try:
        embeddings: Any = model.get_input_embeddings()
    except NotImplementedError:  # networks of images or sound
        raise ValueError(f"{subject} reads no tokens: {type(model).__name__} embeds none") from None
    if not isinstance(getattr(embeddings, "weight", None), Tensor):
        raise ValueError(f"{subject} reads no tokens: its inputs go to {type(embeddings).__name__}")
    size, largest = int(embeddings.weight.shape[0]), max(int(ids.max()) for ids in encoded)
    if largest >= size:
        raise ValueError(
            f"the tokenizer gives token {largest}, but {subject} knows {size}: they do not belong together"
        )

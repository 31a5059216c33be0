"""What heads look at: the neighbour, the first token, delimiters, the token itself, repetitions."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

Kind = Literal[
    "first token", "previous token", "next token", "self", "delimiter", "duplicate token", "induction"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
IN_TEXT, ON_REPETITION = KINDS[:5], KINDS[5:]
"""Kinds found on the given texts, and those found on random tokens that repeat."""
KIND_FROM = 0.4
"""A head whose largest share, beyond that of uniform rows, reaches this has that kind."""
REPEATED, SEQUENCES = 50, 4
"""Random tokens that are repeated once, and the number of such sequences."""


def kind_of(shares: dict[str, float]) -> Kind | None:
    """The kind with the largest share; None if it stays below KIND_FROM, as in a head of no known kind.

    Kinds found on repetitions come first: on ordinary text, such heads mostly rest on the first token.
    """
    for group in (ON_REPETITION, IN_TEXT):
        kinds = [kind for kind in group if kind in shares]
        best = max(kinds, key=lambda kind: shares[kind], default=None)
        if best is not None and shares[best] >= KIND_FROM:
            return best
    return None


def text_targets(ids: Tensor, delimiters: Tensor, *, causal: bool) -> Tensor:
    """Weights ``[kinds, length, length]`` whose sum with a map is the share of each kind of IN_TEXT.

    ids ``[length]``; delimiters are token ids. A share is the mean over the rows that have such a target;
    the first row, which under a causal mask can only look at itself, never counts.
    """
    length = len(ids)
    positions = torch.arange(length)
    row, column = positions[:, None], positions[None, :]
    on_delimiter = torch.isin(ids, delimiters)[None, :] & (column != row) & (column > 0)
    targets = torch.stack(
        [
            (column == 0).expand(length, length),
            column == row - 1,
            column == row + 1,
            column == row,
            on_delimiter,
        ]
    )
    targets = targets & (row > 0)
    return _averaged(targets & (column <= row) if causal else targets)


def repetition_targets(length: int, repeated: int) -> Tensor:
    """Weights ``[2, length, length]`` of duplicate token and induction for a text that ends in a repetition.

    A row of the second half has its duplicate ``repeated`` tokens before; the token after the duplicate is
    the one that an induction head looks at.
    """
    positions = torch.arange(length)
    row, column = positions[:, None], positions[None, :]
    second = row >= length - repeated
    return _averaged(
        torch.stack([second & (column == row - repeated), second & (column == row - repeated + 1)])
    )


def shares(rows: Tensor, targets: Tensor, *, causal: bool) -> Tensor:
    """Shares ``[..., kinds]`` of maps ``[..., length, length]``, from uniform rows (0) to all (1)."""
    even = torch.ones(rows.shape[-2:], dtype=rows.dtype, device=rows.device)
    even = even.tril() if causal else even
    weights = targets.flatten(1).T.to(rows)
    expected = (even / even.sum(-1, keepdim=True)).flatten() @ weights
    return ((rows.flatten(-2) @ weights - expected) / (1 - expected).clamp(min=1e-6)).clamp(min=0)


def delimiter_ids(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> Tensor:
    """Those of ``ids`` that are special tokens, punctuation or line ends."""
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    return torch.tensor(
        [token for token in sorted(set(ids)) if token in special or _is_mark(tokenizer, token)]
    )


def repeated_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> tuple[Tensor, int]:
    """Ids ``[sequences, length]`` of random tokens, each sequence twice, and how many repeat.

    They follow the token that begins texts, if there is one. 0 repeat if model or vocabulary is too small.
    """
    begin = next(
        (token for token in (tokenizer.bos_token_id, tokenizer.cls_token_id) if token is not None), None
    )
    embeddings: Any = model.get_input_embeddings()
    size = int(embeddings.weight.shape[0])
    ordinary = torch.tensor(sorted(set(range(size)) - set(tokenizer.all_special_ids)))
    length = (2 * REPEATED + 1 if limit is None else limit) - (begin is not None)
    repeated = max(0, min(REPEATED, length // 2, len(ordinary)))
    draws = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(SEQUENCES):
        once = ordinary[torch.randperm(len(ordinary), generator=draws)[:repeated]]
        first = torch.tensor([] if begin is None else [begin], dtype=torch.long)
        rows.append(torch.cat([first, once, once]))
    return torch.stack(rows), repeated


def _averaged(targets: Tensor) -> Tensor:
    """Weights that average over the rows with a target."""
    rows = targets.any(-1).sum(-1).clamp(min=1)
    return targets.float() / rows[:, None, None]


def _is_mark(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    text = str(tokenizer.decode([token])).strip(" ")
    return bool(text) and all(
        character.isspace() or unicodedata.category(character).startswith("P") for character in text
    )

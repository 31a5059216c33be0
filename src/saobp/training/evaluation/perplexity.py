"""Perplexities of a language model on a text, in float32.

Causal: every token given those before it, in overlapping windows. Pseudo: each token masked alone, given
all others. Masked: 15 % of the tokens masked together, as in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from saobp.data import open_corpus, prefix_of, separator_of
from saobp.training.objectives import MaskedLM, head_scores, hidden_states, row_seeds

POSITIONS = 20_000
"""Default number of masked positions of pseudo-perplexity, the same ones for all models of a vocabulary."""
TOKENS_AT_A_TIME = {"cuda": 65_536, "cpu": 4_096}
SCORES_AT_A_TIME = {"cuda": 4_096, "cpu": 256}
"""Positions whose logits are held at once; on a CPU few, so that they stay in the cache."""
MASK_SEED = 20

Advance = Callable[[int, int], None]
"""Progress callback: done, total."""


@torch.no_grad()
def causal_perplexity(
    model: PreTrainedModel,
    tokens: np.ndarray,
    *,
    length: int,
    stride: int | None = None,
    advance: Advance | None = None,
) -> dict[str, Any]:
    """Perplexity of a decoder on one long row of tokens.

    Windows of ``length`` begin every ``stride`` tokens (default: half a window). A window scores only the
    tokens that no earlier one has scored, so each but the first token is scored once.
    """
    stride = length // 2 if stride is None else stride
    if not 1 <= stride <= length - 1:
        raise ValueError(f"stride must lie from 1 to {length - 1}, one below the window, not {stride}")
    if len(tokens) < 2:
        raise ValueError("perplexity needs a text of at least two tokens")
    model.eval()
    starts = list(range(0, max(len(tokens) - length, 0) + stride, stride))
    total, scored = 0.0, 0
    full = [start for start in starts if start + length <= len(tokens)]
    together = max(1, tokens_at_a_time(model) // length)
    groups = [full[at : at + together] for at in range(0, len(full), together)]
    groups += [[start] for start in starts if start + length > len(tokens)]
    for done, group in enumerate(groups):
        size = min(length, len(tokens) - group[0])
        rows = np.stack([tokens[start : start + size] for start in group]).astype(np.int64)
        ids = torch.from_numpy(rows).to(model.device)
        context = torch.tensor([1 if start == 0 else length - stride for start in group])
        is_new = torch.arange(size)[None, :] >= context[:, None]
        hidden = hidden_states(model, ids, "fp32")[:, :-1][is_new[:, 1:].to(ids.device)]
        losses = token_losses(model, hidden, ids[:, 1:][is_new[:, 1:].to(ids.device)])
        total += float(losses.sum())
        scored += len(losses)
        if advance is not None:
            advance(done + 1, len(groups))
    return {
        "perplexity": math.exp(total / scored),
        "tokens": scored,
        "length": length,
        "stride": stride,
        "nats": total,
    }


@torch.no_grad()
def pseudo_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    blocks: np.ndarray,
    *,
    positions: int | None = POSITIONS,
    advance: Advance | None = None,
) -> dict[str, Any]:
    """Perplexity of an encoder on blocks ``[blocks, length]``, one position masked at a time.

    ``positions`` of them are sampled, always the same; None masks every one. ``error`` is the standard error.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError("pseudo-perplexity needs a tokenizer with a mask token")
    model.eval()
    special = np.isin(blocks, tokenizer.all_special_ids)
    rows, columns = np.nonzero(~special)
    available = len(rows)
    if available == 0:
        raise ValueError("the text has no token that could be hidden")
    if positions is not None and positions < available:
        chosen = np.sort(np.random.default_rng(0).permutation(available)[:positions])
        rows, columns = rows[chosen], columns[chosen]
    losses = []
    size = max(1, tokens_at_a_time(model) // blocks.shape[1])
    for begin in range(0, len(rows), size):
        ids = torch.from_numpy(blocks[rows[begin : begin + size]].astype(np.int64)).to(model.device)
        losses.append(masked_losses(model, ids, columns[begin : begin + size], tokenizer.mask_token_id))
        if advance is not None:
            advance(begin + len(ids), len(rows))
    return {**_mean_perplexity(torch.cat(losses)), "positions": len(rows), "of": available}


@torch.no_grad()
def masked_perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, blocks: np.ndarray
) -> dict[str, Any]:
    """Perplexity of the masked tokens of blocks, masked as in training: 15 % of each row, 80 / 10 / 10."""
    objective = MaskedLM.of(tokenizer)
    model.eval()
    losses = []
    size = max(1, tokens_at_a_time(model) // blocks.shape[1])
    for begin in range(0, len(blocks), size):
        ids = torch.from_numpy(blocks[begin : begin + size].astype(np.int64)).to(model.device)
        seeds = torch.from_numpy(row_seeds(MASK_SEED, 0, range(begin, begin + len(ids)))).to(model.device)
        shown, masked_at, targets = objective.hide(ids, seeds)
        hidden = hidden_states(model, shown, "fp32")
        picked = hidden.gather(1, masked_at[..., None].expand(-1, -1, hidden.shape[-1]))
        losses.append(token_losses(model, picked.flatten(0, 1), targets.flatten()))
    return {**_mean_perplexity(torch.cat(losses)), "positions": sum(len(part) for part in losses)}


def masked_losses(model: PreTrainedModel, ids: Tensor, positions: np.ndarray | Tensor, mask: int) -> Tensor:
    """Loss of one token of each row of ``ids``, at ``positions``, after masking it; ``[rows]``."""
    rows, columns = torch.arange(len(ids), device=ids.device), torch.as_tensor(positions, device=ids.device)
    targets = ids[rows, columns]
    ids[rows, columns] = mask
    return token_losses(model, hidden_states(model, ids, "fp32")[rows, columns], targets)


def token_losses(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target, ``[positions]``, for hidden ``[positions, width]``."""
    size = SCORES_AT_A_TIME["cuda" if model.device.type == "cuda" else "cpu"]
    parts = [
        torch.nn.functional.cross_entropy(
            head_scores(model, hidden[at : at + size][None], "fp32")[0].float(),
            targets[at : at + size],
            reduction="none",
        )
        for at in range(0, len(hidden), size)
    ]
    return torch.cat(parts) if parts else hidden.new_zeros(0)


def _mean_perplexity(losses: Tensor) -> dict[str, float]:
    """Perplexity and its standard error, propagated from that of the mean loss."""
    values = losses.double()
    perplexity = math.exp(float(values.mean()))
    spread = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"perplexity": perplexity, "error": perplexity * spread}


def tokens_at_a_time(model: PreTrainedModel) -> int:
    return TOKENS_AT_A_TIME["cuda" if model.device.type == "cuda" else "cpu"]


WIKITEXT = "wikitext2_raw"
WIKITEXT_ON_HUB = "Salesforce/wikitext@wikitext-2-raw-v1"


@dataclass(frozen=True)
class WikiText:
    """A tokenised text: ``documents`` are rows of tokens without special ones."""

    documents: list[np.ndarray]
    words: int
    checksum: str

    @property
    def row(self) -> np.ndarray:
        """All documents one after the other, as in the file."""
        return np.concatenate(self.documents)

    def blocks(self, tokenizer: PreTrainedTokenizerFast, length: int) -> np.ndarray:
        """Full blocks ``[blocks, length]`` as in training: a separator after each document, [CLS] first."""
        end = np.array([separator_of(tokenizer)], dtype=np.int64)
        stream = np.concatenate([part for document in self.documents for part in (document, end)])
        prefix = prefix_of(tokenizer)
        front = [] if prefix is None else [prefix]
        inner = length - len(front)
        count = len(stream) // inner
        if count == 0:
            raise ValueError(f"the text has {len(stream)} tokens, fewer than one block of {length}")
        body = stream[: count * inner].reshape(count, inner)
        return np.concatenate([np.tile(np.array(front, dtype=np.int64), (count, 1)), body], axis=1)


def read_wikitext(
    tokenizer: PreTrainedTokenizerFast, data_dir: str | Path | None, *, documents: int | None = None
) -> WikiText:
    """WikiText-2's test split, from ``data_dir/wikitext2_raw`` or the hub; at most so many documents."""
    corpus = open_corpus(WIKITEXT_ON_HUB if data_dir is None else WIKITEXT, data_dir, "test")
    texts = list(corpus.documents())[:documents]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    return WikiText(
        [np.asarray(ids, dtype=np.int64) for ids in encoded],
        sum(len(text.split()) for text in texts),
        corpus.checksum,
    )

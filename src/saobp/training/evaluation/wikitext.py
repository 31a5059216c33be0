"""WikiText as tokens: one long row for a decoder, packed blocks for an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from saobp.data import open_corpus, prefix_of, separator_of

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

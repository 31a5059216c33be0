"""The widths and depths of the paper's models."""

from __future__ import annotations

from dataclasses import dataclass

FAMILY_NAMES = {"bert": "BERT", "gpt2": "GPT-2", "modernbert": "ModernBERT", "llama": "Llama"}
DECODERS = ("gpt2", "llama")
"""Families that predict the next token, with GPT-2's tokenizer. The others predict masked tokens."""


@dataclass(frozen=True)
class Size:
    """Layers, width of hidden states, heads, and width of the feed-forward layer."""

    layers: int
    hidden: int
    heads: int
    ffn: int


PAPER_SIZES = {
    "mini": Size(4, 256, 4, 1024),
    "small": Size(4, 512, 8, 2048),
    "medium": Size(8, 512, 8, 2048),
}
"""The same for BERT and GPT-2."""

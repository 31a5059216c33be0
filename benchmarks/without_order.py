"""Held-out perplexity of predictions that know words but not their order, on the masks of pretraining.

python benchmarks/without_order.py --tokens TOKENS [--out PAGE.md]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from saobp.lab.scales import CORPUS
from saobp.runs.machine import commit
from saobp.storage.atomic import write_atomically
from saobp.training.batches import Batch, BatchShard, TokenRows, held_out_batches
from saobp.training.dataset import data_of
from saobp.training.objectives import MaskedLM
from saobp.training.recipes import paper

ROW_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
"""Shares of the row's own words that are tried; the best one is chosen on training rows."""
CHUNK = 20_000


@dataclass(frozen=True)
class Frequencies:
    """Word frequencies of each corpus ``[corpora, vocabulary]`` and the corpora's shares of all words."""

    words: Tensor
    shares: Tensor

    @classmethod
    def of(cls, counts: Tensor, special: Sequence[int]) -> Frequencies:
        """From counts ``[corpora, vocabulary]``, smoothed by those of all corpora; none of special tokens."""
        whole = counts.sum(0) + 1
        whole[list(special)] = 0
        smooth = counts + 1000 * whole / whole.sum()
        return cls(smooth / smooth.sum(1, keepdim=True), counts.sum(1) / counts.sum())


def count_words(rows: TokenRows, objective: MaskedLM) -> Tensor:
    """How often each token occurs in one epoch, special ones left out: ``[vocabulary]``."""
    counts = np.zeros(objective.vocabulary)
    for first in range(0, len(rows), CHUNK):
        ids = rows.at(np.arange(first, min(len(rows), first + CHUNK)))["input_ids"].numpy()
        counts += np.bincount(ids.ravel(), minlength=objective.vocabulary)
    counts[list(objective.special)] = 0
    return torch.from_numpy(counts)


def probability(
    tokens: Tensor,
    shown: Tensor,
    places: Tensor,
    frequencies: Frequencies,
    objective: MaskedLM,
    *,
    by_corpus: bool,
    row_share: float,
) -> Tensor:
    """Probability of tokens ``[rows, predicted]`` at masked places of the rows shown ``[rows, length]``.

    by_corpus: whether the corpus is inferred from the words of the row
    row_share: share of the prediction that is a word drawn from the others shown in the row
    A token that is shown at its place is the hidden one or a random one, by their chances.
    """
    special = torch.isin(shown, torch.tensor(objective.special))
    here = shown.gather(1, places)
    corpora = frequencies.shares.log().expand(len(shown), -1)
    if by_corpus:
        corpora = corpora + frequencies.words.log()[:, shown].masked_fill(special, 0).sum(2).T
    corpora = corpora.softmax(1)
    found = torch.einsum("rc,crp->rp", corpora, frequencies.words[:, tokens])
    if row_share:
        is_word_here = ~special.gather(1, places)
        same = ((shown.unsqueeze(1) == tokens.unsqueeze(2)) & ~special.unsqueeze(1)).sum(2)
        others = (~special).sum(1, keepdim=True) - is_word_here.long()
        drawn = (same - (is_word_here & (here == tokens)).long()) / others
        found = (1 - row_share) * found + row_share * drawn
    chance = torch.einsum("c,crp->rp", frequencies.shares, frequencies.words[:, here])
    kept = torch.where(here == objective.mask, 0.0, chance / (chance + 1 / objective.vocabulary))
    return kept * (here == tokens) + (1 - kept) * found


def losses(batches: Sequence[Batch], frequencies: Frequencies, objective: MaskedLM, **known: float) -> Tensor:
    """The loss at each masked place of all batches, in nats."""
    found = []
    for batch in batches:
        shown, places, targets = objective.hide(batch["input_ids"], batch["seeds"])
        found.append(-probability(targets, shown, places, frequencies, objective, **known).log().flatten())  # type: ignore[arg-type]
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--corpus", default=CORPUS)
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    recipe = paper("bert", "mini")
    names = given.corpus.split(",")
    data, *each = (data_of(replace(recipe, corpus=name), given.tokens) for name in (given.corpus, *names))
    objective = MaskedLM.of(data.tokenizer)
    counts = torch.stack([count_words(one.train, objective) for one in each])
    frequencies = Frequencies.of(counts, objective.special)
    shard = BatchShard(recipe, 0, 1, torch.device("cpu"))
    training = held_out_batches(data.train, shard)
    assert data.validation is not None
    held_out = held_out_batches(data.validation, shard)
    rows = []
    for words, by_corpus, shares in (
        ("how frequent each word is", False, (0.0,)),
        ("and which corpus the row is from, by its words", True, (0.0,)),
        ("how frequent each word is, and the other words of the row", False, ROW_SHARES),
        ("all of it", True, ROW_SHARES),
    ):
        known = [{"by_corpus": by_corpus, "row_share": share} for share in shares]
        best = min(known, key=lambda one: losses(training, frequencies, objective, **one).mean().item())
        own = losses(held_out, frequencies, objective, **best)
        loss, error = own.mean().item(), own.std().item() / math.sqrt(len(own))
        share = f"{best['row_share']:.2f}" if len(shares) > 1 else ""
        rows.append(f"| {words} | {share} | {loss:.3f} ± {error:.3f} | {math.exp(loss):.0f} |")
        print(rows[-1], flush=True)
    if given.out is None:
        return
    checksums = ", ".join(f"{name} {store.checksum[:12]}" for name, store in data.train.stores.items())
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out, page(rows, len(own), checksums))


def page(rows: Sequence[str], places: int, checksums: str) -> str:
    return "\n".join(
        [
            "# What can be predicted without the order of words",
            "",
            "| what is known | share of the row's words | held-out loss ± standard error | perplexity |",
            "|---|---|---|---|",
            *rows,
            "",
            f"No model is trained here: these are predictions by counting, on the {places:,} masked places "
            "whose loss pretraining by the recipe `paper` reports (same rows, same masks). A word that is "
            "shown at its place, as in 20 % of them, is taken for the hidden one or a random one by their "
            "chances, which a model learns without looking elsewhere. Frequencies are those of the training "
            "rows, and the share of the prediction that is drawn from the row's other words is chosen on "
            "training rows. Attention that weighs all tokens alike can count the words of a row: it need not "
            "tell places or words apart.",
            "",
            f"Made by `python benchmarks/without_order.py --tokens tokens` at commit {commit()}; tokens: "
            f"{checksums}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()

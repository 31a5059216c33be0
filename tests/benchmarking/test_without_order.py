"""Predictions without the order of words: they are probabilities, and each piece of knowledge counts."""

from __future__ import annotations

import pytest
import torch

from saobp.testing.scripts import load_script
from saobp.training.objectives import MaskedLM

script = load_script("benchmarks/without_order.py")
OBJECTIVE = MaskedLM(12, 1, (0, 1), share=0.25)
COUNTS = torch.tensor([[0, 0, *[8e3] * 5, *[1e3] * 5], [0, 0, *[1e3] * 5, *[3e4] * 5]]).double()
FREQUENCIES = script.Frequencies.of(COUNTS, OBJECTIVE.special)
KNOWN = [(by_corpus, share) for by_corpus in (False, True) for share in (0.0, 0.3)]


def shown_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, 12, (6, 16), generator=torch.Generator().manual_seed(3))
    ids[:, 0] = 0
    return OBJECTIVE.hide(ids, torch.arange(6) * 7919)


@pytest.mark.parametrize(("by_corpus", "row_share"), KNOWN)
def test_probabilities_of_all_words_sum_to_one(by_corpus: bool, row_share: float) -> None:
    shown, places, targets = shown_rows()
    known = {"by_corpus": by_corpus, "row_share": row_share}
    of_words = [
        script.probability(torch.full_like(targets, word), shown, places, FREQUENCIES, OBJECTIVE, **known)
        for word in range(12)
    ]
    torch.testing.assert_close(sum(of_words), torch.ones(targets.shape, dtype=torch.double))
    assert (of_words[0] == 0).all(), "special tokens are never hidden"
    here = shown.gather(1, places)
    assert {bool(one) for one in (here == 1).flatten()} == {True, False}, "both kinds of places are seen"


def test_the_corpus_and_the_words_of_a_row_are_of_use() -> None:
    """Rows of one corpus that repeat one word: it is likelier by each of the two."""
    shown = torch.tensor([[0, *[2] * 14, 1]])
    places, target = torch.tensor([[15]]), torch.tensor([[2]])
    found = [
        script.probability(target, shown, places, FREQUENCIES, OBJECTIVE, by_corpus=a, row_share=b).item()
        for a, b in KNOWN
    ]
    neither, words, corpus, both = found
    assert neither < corpus < both
    assert neither < words < both
    assert words == pytest.approx(0.7 * neither + 0.3)

"""Rows that are drawn for the entropies, and the error bars of means over them."""

from __future__ import annotations

import pytest
import torch

from saobp.metrics import Sampling, measure
from saobp.metrics.sampling import draw_rows

ROWS = 62


def row_entropies(tokens: int, causal: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Of heads, ``[tokens]`` each: random, sharp, diagonal, local, with sinks, with one odd row."""
    noise = torch.Generator().manual_seed(1000 * seed + tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    place = torch.arange(tokens, dtype=torch.float64)
    to_first = (place == 0).double()
    scores = {
        "random": 1.5 * random(tokens, tokens),
        "sharp": 6 * random(tokens, tokens),
        "diagonal": 0.2 * random(tokens, tokens) + 8 * torch.eye(tokens, dtype=torch.float64),
        "sink": 0.5 * random(tokens, tokens) + 6 * to_first,
        "some sinks": 0.5 * random(tokens, tokens) + (3 + 3 * random(tokens, 1)) * to_first,
        "local": 0.3 * random(tokens, tokens) - 0.5 * (place[:, None] - place).abs(),
        "one odd row": 0.3 * random(tokens, tokens),
        "even but for one row": torch.zeros(tokens, tokens, dtype=torch.float64),
    }
    scores["one odd row"][tokens // 2] *= 30
    scores["even but for one row"][tokens * 2 // 3, 1] = 50
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) & causal
    rows = {name: one.masked_fill(hidden, float("-inf")).softmax(-1) for name, one in scores.items()}
    return {name: torch.special.entr(one).sum(-1) for name, one in rows.items()}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("tokens", [63, 65, 66, 70, 90, 125, 200, 4 * ROWS])
def test_no_row_of_a_short_text_is_missed(tokens: int, causal: bool) -> None:
    drawn = draw_rows(tokens, ROWS, torch.Generator().manual_seed(0), causal=causal)
    for name, entropies in row_entropies(tokens, causal).items():
        found = drawn.mean(entropies[drawn.positions])
        torch.testing.assert_close(found.value, entropies.mean(), msg=lambda words, name=name: name + words)
        assert found.standard_error == 0


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("tokens", [4 * ROWS + 1, 256, 300])
def test_intervals_cover_as_often_as_they_claim_beyond(tokens: int, causal: bool) -> None:
    """Over heads without rare rows: of those a drawn row tells nothing."""
    heads = [row_entropies(tokens, causal, seed) for seed in range(5)]
    values = torch.stack([one[name] for one in heads for name in one if "one" not in name])
    truth, draws, hits = values.mean(-1), 100, dict.fromkeys((0.8, 0.95), 0)
    for seed in range(draws):
        drawn = draw_rows(tokens, ROWS, torch.Generator().manual_seed(seed), causal=causal)
        found = drawn.mean(values[:, drawn.positions])
        for level in hits:
            low, high = found.interval(level)
            hits[level] += int(((low <= truth) & (truth <= high)).sum())
    for level, count in hits.items():
        assert abs(count / draws / len(values) - level) < 0.02, (level, count / draws / len(values))


def test_rows_are_drawn_once_each_and_weighted_by_their_stretch() -> None:
    for tokens, count in ((9, 9), (65, 65), (256, 256), (257, 64), (1000, 64)):
        drawn = draw_rows(tokens, 64, torch.Generator().manual_seed(1))
        assert len(set(drawn.positions.tolist())) == len(drawn.positions) == count
        assert float(drawn.mean(torch.ones(len(drawn.positions))).value) == pytest.approx(1)


@pytest.mark.parametrize("refinement", [None, "high:0.5"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_entropies_of_short_texts_are_exact(causal: bool, refinement: str | None) -> None:
    noise = torch.Generator().manual_seed(0)
    query, key = (1.5 * torch.randn(1, 4, 66, 16, generator=noise) for _ in range(2))
    names = ["attention_entropy", "indirect_entropy"]
    options = {"is_causal": causal, "refinement": refinement, "statistics": names}
    exact = measure(query, key, **options)
    found = measure(query, key, method="sampled", sampling=Sampling(rows=32), **options)
    for name in names:
        torch.testing.assert_close(found[name].value, exact[name].value, atol=2e-5, rtol=2e-5)
        assert (found[name].standard_error < 1e-5).all()

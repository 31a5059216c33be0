"""The first sentences of a page: what was compared, what changed, what not to conclude."""

from __future__ import annotations

from dataclasses import replace

import pytest

from saobp.report import Run, read_runs
from saobp.report.charts import head_figures, strength_title
from saobp.report.opening import opening
from saobp.report.snapshots import VERDICTS
from saobp.report.summaries import TERMS
from saobp.testing.fake_runs import make_run

HIGH = {"factor": "high", "strength": 0.2, "steps": 1, "damping": 0.0, "future": "strict"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    root = tmp_path_factory.mktemp("runs")
    folders = [
        make_run(root / "plain", steps=50, measured=2),
        make_run(root / "high", steps=50, measured=2, refinement=HIGH),
        make_run(root / "plain-1", steps=50, measured=2, seed=1),
        make_run(root / "high-1", steps=50, measured=2, seed=1, refinement=HIGH),
    ]
    return read_runs(folders)


def test_one_seed_is_called_no_evidence(runs: list[Run]) -> None:
    said = opening(runs[:2])
    assert said is not None
    assert (
        said.compared == "The same bert mini, trained twice on the same data (seed 42): plain and high:0.2."
    )
    assert said.changed.startswith("From plain to high: validation perplexity ")
    assert "with one seed each a difference is no evidence" in said.caution
    assert [track.name for track in said.tracks] == ["plain", "high"]
    assert len(said.moves) == len(said.tracks[0].dots) == 32


def test_several_seeds_of_each_method_are_told_apart_from_one(runs: list[Run]) -> None:
    several = opening(runs)
    uneven = opening(runs[:3])
    assert several is not None
    assert uneven is not None
    assert several.caution.startswith("2 seeds or more of each method")
    assert "(seeds 42 and 1)" in several.compared
    assert "no evidence" in uneven.caution
    assert several.moves == []


def test_runs_that_differ_in_more_are_not_called_the_same(runs: list[Run]) -> None:
    longer = replace(runs[1], recipe=[*runs[1].recipe, ("dropout", 0.1)])
    said = opening([runs[0], longer])
    assert said is not None
    assert "differ in more than their attention" in said.compared


def test_a_single_run_shows_its_layers_and_an_empty_one_nothing(runs: list[Run]) -> None:
    said = opening(runs[:1])
    assert said is not None
    assert [track.name for track in said.tracks] == [f"layer {layer}" for layer in range(4)]
    assert opening([Run("nothing", "run")]) is None


def test_strengths_are_called_what_they_are(runs: list[Run]) -> None:
    recipe = [(name, "learned" if name == "refinement.strength" else value) for name, value in runs[1].recipe]
    learned = replace(runs[1], recipe=recipe)
    assert strength_title(runs) == "fixed strength (λ)"
    assert strength_title([runs[0], learned]) == "learned strength (λ)"
    assert strength_title([runs[1], learned]) == "strength (λ)"
    assert head_figures(runs)["titles"]["strengths"] == "fixed strength (λ)"


def test_every_verdict_and_statistic_has_an_explanation(runs: list[Run]) -> None:
    titles = head_figures(runs)["titles"].values()
    for title in titles:
        words = title.partition(" (")[0]
        assert words in TERMS or words.split()[-1] in TERMS, title
    assert set(VERDICTS) <= set(TERMS)

"""Figures from planted numbers: what a reader can see of them."""

from __future__ import annotations

import pytest
from matplotlib.colors import same_color
from matplotlib.figure import Figure

from saobp.lab import EXPERIMENTS, get_scale
from saobp.lab.axes import far_beyond
from saobp.lab.cells import three_digits
from saobp.lab.figures import curves, dots, progress
from saobp.lab.method_style import STYLES
from saobp.lab.result_page import Page

NEAR = {"original": {42: 28.4, 1: 26.9}, "high": {42: 28.9, 1: 27.4}, "low": {42: 28.6, 1: 27.8}}
WITH_FAR = {**NEAR, "elemmul": {42: 99.1, 1: 75.0}, "entropy": {42: 28.4}}


def _colours(figure: Figure, marker: str) -> set[str]:
    lines = [line for axis in figure.axes for line in axis.lines if line.get_marker() == marker]
    return {str(line.get_color()) for line in lines}


def test_a_method_looks_the_same_on_every_figure() -> None:
    """Wherever it stands among others."""
    alone = {"original": [[0.1, 0.2]], "entropy": [[0.2, 0.3]]}
    for figure in (dots({"perplexity": WITH_FAR}), curves({"GTD": alone}, {})):
        for key in ("original", "entropy"):
            colour, marker = STYLES[key]
            assert all(same_color(found, colour) for found in _colours(figure, marker))
            assert _colours(figure, marker)


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ([[27.0, 28.0], [28.0, 30.0], [27.5], [75.0, 99.0]], 3),
        ([[75.0, 99.0], [28.0, 30.0], [27.5], [27.0, 28.0]], 0),
        ([[27.0, 28.0], [28.0, 30.0], [27.5], [32.0]], None),
        ([[65.8], [66.0], [68.8], [65.9]], None),
        ([[300.0, 301.0], [45.0, 46.0], [302.0, 303.0]], None),
        ([], None),
    ],
)
def test_one_method_far_beyond_several_others(methods: list[list[float]], expected: int | None) -> None:
    assert far_beyond(methods) == expected


def test_a_method_far_beyond_does_not_squeeze_the_others() -> None:
    (axis,) = dots({"perplexity": WITH_FAR}).axes
    at = {value: axis.transAxes.inverted().transform(axis.transData.transform((value, 0)))[0]
          for value in (26.9, 28.9, 75.0, 99.1)}  # fmt: skip
    assert at[28.9] - at[26.9] > 0.5
    assert 0.75 < at[75.0] < at[99.1] < 1
    low, high = axis.get_xlim()
    assert low < 26.9
    assert high > 99.1
    assert any(tick > 75 for tick in axis.get_xticks())


def test_a_large_difference_between_few_methods_is_not_cut_out() -> None:
    few = {"original": {42: 299.0}, "paper": {42: 45.0}, "strict": {42: 303.0}}
    (axis,) = dots({"perplexity": few}).axes
    assert axis.get_xscale() == "log"


def test_rows_say_their_mean_or_that_there_is_none() -> None:
    figure = dots({"perplexity": NEAR, "GTD": {"original": {42: 0.7}}})
    said = [[text.get_text() for text in axis.texts] for axis in figure.axes]
    assert said == [["27.6", "28.1", "28.2"], ["0.700", "no number", "no number"]]


@pytest.mark.parametrize(
    ("value", "words"), [(299.82, "300"), (0.15637, "0.156"), (0.0, "0"), (11.0, "11.0"), (12345.6, "12,346")]
)
def test_numbers_beside_marks_are_short(value: float, words: str) -> None:
    assert three_digits(value) == words


def test_training_is_compared_in_pairs_and_the_far_method_is_named() -> None:
    ends = {"original": 28, "high": 29.5, "low": 29, "learned": 27.5, "elemmul": 80}
    runs = {
        key: {seed: [(x, end + seed + 100 / x) for x in (50.0, 100.0, 200.0)] for seed in (1, 2)}
        for key, end in ends.items()
    }
    _, end = progress(runs).axes
    drawn = {tuple(round(float(y), 6) for y in line.get_ydata()) for line in end.lines}
    assert drawn == {(1.5, 1.5), (1.0, 1.0), (-0.5, -0.5), (0, 0)}
    assert end.get_title().endswith("ElemMul is beyond: +52.0 at the end")


def test_figures_have_words_for_those_who_cannot_see_them() -> None:
    page = Page(EXPERIMENTS["decoder-leak"], get_scale("mini"))
    moved = {"original": {42: 0.0, 1: 0.0}, "paper": {42: 0.153, 1: 0.159}}
    page.dots("leak", {"moved": moved, "perplexity": {}}, "What leaks.")
    page.dots("nothing", {"perplexity": {}}, "No numbers.")
    (block,) = page.blocks
    assert block.startswith("![What leaks. Means: moved: 0 (Original), 0.156 (High, paper form (leaks)).](")
    assert block.endswith("(mini-leak.svg)\n\nWhat leaks.")

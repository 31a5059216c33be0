"""Colours and markers: one for each method, told apart by every kind of sight."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from saobp.lab import EXPERIMENTS
from saobp.lab.method_style import STYLES
from saobp.lab.methods import METHODS

SIGHTS = {
    "full": np.eye(3),
    "without red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "without green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "without blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""What is seen of linear red, green and blue (Machado, Oliveira and Fernandes, 2009)."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
COMMON = ("original", "high", "learned", "low", "elemmul", "entropy", "eigen")
CLEARLY = 15.0
"""In CIELAB, where about 2 can just be seen side by side."""


def _seen(colour: str, sight: str) -> np.ndarray:
    """A colour in CIELAB."""
    channels = np.array(to_rgb(colour))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    relative = TO_XYZ @ np.clip(np.asarray(SIGHTS[sight]) @ linear, 0, 1) / TO_XYZ.sum(1)
    x, y, z = np.where(relative > 0.008856, np.cbrt(relative), 7.787 * relative + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _distance(one: str, other: str, sight: str) -> float:
    return float(np.linalg.norm(_seen(STYLES[one].colour, sight) - _seen(STYLES[other].colour, sight)))


def test_every_method_has_a_colour_of_its_own() -> None:
    assert set(STYLES) == set(METHODS)
    assert len({look.colour for look in STYLES.values()}) == len(STYLES)


@pytest.mark.parametrize("sight", SIGHTS)
def test_colour_alone_tells_common_methods_apart(sight: str) -> None:
    close = [pair for pair in combinations(COMMON, 2) if _distance(*pair, sight) < CLEARLY]
    assert not close


@pytest.mark.parametrize("sight", SIGHTS)
def test_methods_of_one_figure_differ_in_colour_or_marker(sight: str) -> None:
    together = {
        pair
        for experiment in EXPERIMENTS.values()
        for methods in (experiment.bert, experiment.gpt2)
        for pair in combinations(methods, 2)
    }
    alike = [pair for pair in together if STYLES[pair[0]].marker == STYLES[pair[1]].marker]
    assert not [pair for pair in alike if _distance(*pair, sight) < CLEARLY]

"""Axes for a wide range of values: logarithmic, or broken for an outlying method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

Side = Literal["x", "y"]
SEVERAL_SIZES = 4.0
FAR = 3.0
"""Least distance of an outlier, in ranges of the other methods."""
TIMES = 1.5
"""Least ratio of an outlier to them: scores of 66 and 69 need no break."""
FEWEST = 4
"""Least methods of a broken axis: with fewer, the distance is the point of the figure."""
PART_BOUNDS = (0.0, 0.68, 0.75, 1.0)
"""Starts and ends of the two parts of a broken axis, as shares of its length."""


def fit(axes: Axes, side: Side, methods: Iterable[Sequence[float]]) -> None:
    """Choose the axis by the values of each method: broken, logarithmic or, by default, linear."""
    methods = [list(values) for values in methods if values]
    everything = [value for values in methods for value in values]
    beyond = far_beyond(methods)
    if beyond is not None:
        others = [value for index, values in enumerate(methods) if index != beyond for value in values]
        _break(axes, side, others, methods[beyond])
    elif everything and min(everything) > 0 and max(everything) >= SEVERAL_SIZES * min(everything):
        logarithmic(axes, side)


def far_beyond(methods: Sequence[Sequence[float]]) -> int | None:
    """Index of the one method whose values are all far above those of several others."""
    if len(methods) < FEWEST:
        return None
    highest = max(range(len(methods)), key=lambda index: max(methods[index]))
    others = [value for index, values in enumerate(methods) if index != highest for value in values]
    gap = min(methods[highest]) - max(others)
    is_far = gap > FAR * (max(others) - min(others)) and min(methods[highest]) >= TIMES * max(others)
    return highest if is_far else None


def logarithmic(axes: Axes, side: Side) -> None:
    """Logarithmic axis with plain tick labels."""
    axes.set(**{f"{side}scale": "log"})
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _break(axes: Axes, side: Side, near: Sequence[float], far: Sequence[float]) -> None:
    """Two linear parts with different scales, and a grey strip between them."""
    ends = [end for part in (near, far) for end in _padded(part)]
    first, last = ends[1] - ends[0], ends[3] - ends[2]
    limits = [ends[0] - first, *ends, ends[3] + last]
    indices = [PART_BOUNDS[0] - PART_BOUNDS[1], *PART_BOUNDS, 2 * PART_BOUNDS[3] - PART_BOUNDS[2]]
    functions = (lambda x: np.interp(x, limits, indices), lambda y: np.interp(y, indices, limits))
    (axes.set_xscale if side == "x" else axes.set_yscale)("function", functions=functions)
    axes.set(**{f"{side}lim": (ends[0], ends[3])})
    ticks = [
        tick
        for low, high, most in ((ends[0], ends[1], 5), (ends[2], ends[3], 2))
        for tick in MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)
        if low <= tick <= high
    ]
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")
    (axes.axvspan if side == "x" else axes.axhspan)(ends[1], ends[2], color="#ececec", lw=0, zorder=-1)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    room = 0.08 * (max(values) - min(values)) or 0.02 * abs(max(values)) or 1.0
    return min(values) - room, max(values) + room

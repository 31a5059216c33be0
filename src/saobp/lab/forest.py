"""The forest plot of the arena: methods by rows, paired differences with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

from saobp.lab.arena_records import Setting, title_of
from saobp.lab.cells import format_percent
from saobp.lab.statistics import Gain

COLOURS = {"gain": "#009e73", "loss": "#d55e00"}
UNDECIDED = "#555555"
ROW, AROUND = 0.29, 0.62
"""Inches of a row, and of what is above and below a panel."""


@dataclass(frozen=True)
class Row:
    """A comparison: its mean, and the difference of each pair in per cent of perplexity."""

    label: str
    gain: Gain
    pairs: Sequence[float]

    @property
    def text(self) -> str:
        lower = sum(pair < 0 for pair in self.pairs)
        return f"{format_percent(self.gain)}, {lower} of {len(self.pairs)}"


def forest(settings: Sequence[Setting]) -> Figure:
    """A panel for each setting, one below the other: paired differences with intervals, in words beside them.

    Of a model with fresh seeds those alone are shown. What was decided comes first.
    """
    confirmed = {one.recipe["family"] for one in settings if one.fresh and one.gains()}
    shown = [one for one in settings if one.gains() and (one.fresh or one.recipe["family"] not in confirmed)]
    rows = [_rows(one) for one in shown]
    heights = [ROW * len(own) + AROUND for own in rows]
    figure = Figure(figsize=(9.6, sum(heights) + 0.6), layout="constrained")
    axes = figure.subplots(len(shown), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    low, high = _reach([row.gain for own in rows for row in own])
    for axis, setting, own in zip(axes, shown, rows, strict=True):
        axis.set_xlim(low, high)
        axis.axvline(0, color="#888888", lw=1)
        for place, row in enumerate(own):
            _draw(axis, place, row)
        axis.set_yticks(range(len(own)), [row.label for row in own], fontsize=9)
        axis.set_ylim(len(own) - 0.5, -0.5)
        axis.tick_params(axis="y", length=0, pad=9)  # room for an arrow
        axis.set_title(" ", fontsize=10)  # room for the text, which begins at the left of the labels
        axis.text(
            *(0.01, 1.02, setting.title),
            transform=blended_transform_factory(figure.transFigure, axis.transAxes),
            fontsize=10,
            weight="bold",
            in_layout=False,
        )
        axis.grid(axis="x", lw=0.4, alpha=0.5)
        axis.spines[["top", "right", "left"]].set_visible(False)
    figure.supxlabel(
        "difference of held-out perplexity, %, from plain attention (A added to B: from B); left is better\n"
        "point: mean, bar: 95 % interval (arrow: it goes on), ticks: pairs of runs with the same seed; "
        "grey: the interval includes zero, or pairs are too few\n"
        "numbers: mean [95 % interval], pairs in which perplexity is lower",
        fontsize=8.5,
    )
    return figure


def _rows(setting: Setting) -> list[Row]:
    """Each method against plain attention, and each combination against itself without its first part."""
    rows = []
    for method, gain in setting.gains().items():
        rows.append(Row(title_of(method), gain, list(setting.differences(method).values())))
        first, _, rest = method.partition("+")
        added = setting.gain_over(method, rest) if rest in setting.losses else None
        if added is not None:
            label = f"{title_of(first)} added to {title_of(rest)}"
            rows.append(Row(label, added, list(setting.differences(method, rest).values())))
    return sorted(rows, key=lambda row: (row.gain.verdict not in COLOURS, row.gain.difference))


def _draw(axis: Axes, place: int, row: Row) -> None:
    low, high = axis.get_xlim()
    colour = COLOURS.get(row.gain.verdict, UNDECIDED)
    if row.gain.low is not None and row.gain.high is not None:
        axis.plot([row.gain.low, row.gain.high], [place] * 2, color=colour, lw=2, solid_capstyle="butt")
        for end, beyond, marker in (
            (low, row.gain.low < low, "<"),
            (high, row.gain.high > high, ">"),
        ):
            if beyond:
                axis.plot(end, place, marker, color=colour, ms=6, clip_on=False)
    axis.plot(row.pairs, [place] * len(row.pairs), "|", color=colour, ms=8, mew=0.9)
    axis.plot(row.gain.difference, place, "o", color=colour, ms=6)
    axis.text(
        *(1.02, place, row.text),
        transform=axis.get_yaxis_transform(),
        va="center",
        fontsize=9,
        color=colour,
    )


def _reach(gains: Sequence[Gain]) -> tuple[float, float]:
    """Axis limits: all means, with room for an interval of the usual width on either side."""
    means = [0.0, *(gain.difference for gain in gains)]
    widths = [gain.high - gain.low for gain in gains if gain.low is not None and gain.high is not None]
    room = float(np.median(widths)) if widths else 1.0
    return min(means) - room, max(means) + room

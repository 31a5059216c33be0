"""The forest plot of the arena: methods by rows, paired differences with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from textwrap import fill

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from saobp.lab.arena_records import ORIGINAL, Setting, title_of
from saobp.lab.figures import panels
from saobp.lab.statistics import LEAST_PAIRS

MARKERS = "osD^vP"
WIDTH = 56
"""Letters of a line above a panel."""


def forest(settings: Sequence[Setting]) -> Figure:
    """Methods by rows, a panel for each recipe of encoders and decoders: paired differences with intervals.

    Methods of the first setting come first.
    """
    settings = [one for one in settings if one.gains()]
    recipes: dict[str, list[Setting]] = {}
    for one in settings:
        recipes.setdefault(f"{one.is_decoder} {one.distinct}", []).append(one)
    sides = list(recipes.values())
    methods = sorted(
        {method for one in settings for method in one.gains()},
        key=lambda method: (method not in settings[0].gains(), _mean_gain(settings, method)),
    )
    size = (6.6 if len(sides) == 1 else 4.8, 0.36 * len(methods) + 1.6)
    figure, axes = panels(len(sides), len(sides), size=size)
    for place, (axis, side) in enumerate(zip(axes, sides, strict=True)):
        axis.axvline(0, color="#888888", lw=1)
        for number, setting in enumerate(side):
            shift = 0.22 * (number - (len(side) - 1) / 2)
            for method, gain in setting.gains().items():
                row = methods.index(method) + shift
                colour = {"gain": "#009e73", "loss": "#d55e00"}.get(gain.verdict, "#444444")
                if gain.low is not None and gain.high is not None:
                    axis.plot([gain.low, gain.high], [row, row], color=colour, lw=1.8, solid_capstyle="butt")
                pairs = list(setting.differences(method).values())
                axis.plot(pairs, [row] * len(pairs), "|", color=colour, ms=6, mew=0.8)
                axis.plot(gain.difference, row, MARKERS[number % len(MARKERS)], color=colour, ms=5)
        if len(side) > 1:
            handles = [
                Line2D(
                    [], [], marker=MARKERS[n % len(MARKERS)], color="#444444", lw=0, label=_with_seeds(one)
                )
                for n, one in enumerate(side)
            ]
            figure.legend(
                handles=handles,
                fontsize=7,
                frameon=False,
                loc="outside upper right" if place else "outside upper left",
            )
        axis.set_yticks(range(len(methods)), [title_of(method) for method in methods], fontsize=8)
        if place:
            axis.tick_params(axis="y", labelleft=False)
        axis.set_ylim(len(methods) - 0.5, -0.5)
        axis.set_xlim(*_reach(side))
        axis.tick_params(axis="x", labelsize=8)
        kind = "decoder" if side[0].is_decoder else "encoder"
        title = f"{kind}: {side[0].title}" if len(side) == 1 else kind
        axis.set_title(fill(title, WIDTH), fontsize=9)
        axis.grid(axis="x", lw=0.4, alpha=0.5)
    figure.supxlabel(
        "difference of held-out perplexity from Original with the same seed, %\n"
        "mean, 95 % interval and single pairs (ticks); in colour where the interval leaves zero out",
        fontsize=8,
    )
    return figure


def _with_seeds(setting: Setting) -> str:
    """A setting's title with all its seeds."""
    seeds = sorted(setting.losses[ORIGINAL])
    title = setting.title if setting.fresh else f"{setting.title}, seeds {', '.join(map(str, seeds))}"
    return fill(title, WIDTH)


def _reach(settings: Sequence[Setting]) -> tuple[float, float]:
    """Axis limits: all pairs, and the intervals of three or more."""
    gains = [gain for setting in settings for gain in setting.gains().values()]
    pairs = [setting.differences(method).values() for setting in settings for method in setting.gains()]
    ends = [0.0, *chain.from_iterable(pairs)]
    ends += [end for gain in gains if gain.pairs >= LEAST_PAIRS for end in (gain.low, gain.high) if end]
    room = 0.08 * (max(ends) - min(ends)) or 1.0
    return min(ends) - room, max(ends) + room


def _mean_gain(settings: Sequence[Setting], method: str) -> float:
    return float(np.mean([one.gains()[method].difference for one in settings if method in one.gains()]))

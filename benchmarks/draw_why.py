"""A picture and tables of what ``why_it_helps.py`` found.

    python benchmarks/draw_why.py why.json --strengths runs/learned/health.jsonl --out results/arena/why

``--strengths``: lines with a step and the strengths of all heads by layer, as in a run's ``health.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from saobp.lab.arena import title_of
from saobp.lab.figures import save_figure
from saobp.lab.result_page import markdown_table
from saobp.refinement import Refinement
from saobp.storage.atomic import write_atomically

COLOURS = ("#009e73", "#0072b2", "#d55e00", "#cc79a7")
LAYERS = ("#cfe1f2", "#85bcdb", "#3585bf", "#08306b")
KINDS = {"strength_bias": "strengths", "variants.temperature.head_bias": "temperatures"} | {
    f"variants.{name}.head_bias": name for name in ("qk-norm", "by-distance", "later-steps")
}
SHOWN = 3
"""Methods in the panel of kinds of tokens; the tables have all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("found", type=Path)
    parser.add_argument("--strengths", type=Path)
    parser.add_argument("--out", type=Path, default=Path("why"))
    given = parser.parse_args()
    found = json.loads(given.found.read_text())
    base, *others = found["runs"].values()
    methods = {title_of(str(Refinement.of(one["refinement"]))): one for one in others}
    course = "" if given.strengths is None else given.strengths.read_text()
    lines = [json.loads(line) for line in course.splitlines()]
    for path in save_figure(picture(methods, lines), given.out):
        print(path)
    write_atomically(given.out.with_suffix(".md"), "\n\n".join(page(base, methods)) + "\n")


def picture(methods: dict[str, dict[str, Any]], lines: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1))
    kinds, course = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[0, 1])
    heads = figure.add_subplot(grid[1, 1])
    for axis in (kinds, course, heads):
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    draw_kinds(kinds, dict(list(methods.items())[:SHOWN]))
    if lines:
        draw_course(course, lines)
    draw_heads(heads, next(iter(methods.values())))
    return figure


def draw_kinds(axis: Axes, methods: dict[str, dict[str, Any]]) -> None:
    """Differences from Original in per cent of perplexity by kind of predicted token."""
    first = next(iter(methods.values()))["by_kind"]
    labels: list[str] = []
    row = 0
    places, ticks = {}, []
    for criterion, classes in first.items():
        for name in classes:
            places[criterion, name] = row
            labels.append(f"{criterion}: {name}")
            ticks.append(row)
            row += 1
        row += 0.6
    for number, (title, one) in enumerate(methods.items()):
        for (criterion, name), place in places.items():
            cell = one["by_kind"][criterion].get(name)
            if cell is None:
                continue
            height = place + 0.2 * (number - (len(methods) - 1) / 2)
            low, high = (in_per_cent(cell["difference"] + sign * 1.96 * cell["error"]) for sign in (-1, 1))
            axis.plot([low, high], [height, height], color=COLOURS[number], lw=1.4)
            label = title if (criterion, name) == next(iter(places)) else None
            axis.plot(in_per_cent(cell["difference"]), height, "o", color=COLOURS[number], ms=4, label=label)
    axis.axvline(0, color="#888888", lw=1)
    axis.set_yticks(ticks, labels, fontsize=7.5)
    axis.invert_yaxis()
    axis.legend(fontsize=8, frameon=False, loc="best")
    axis.set_xlabel(
        "difference of held-out perplexity from Original, %\n95 % over texts, one pair of models", fontsize=8
    )
    axis.set_title("Which tokens gain", fontsize=10)


def draw_course(axis: Axes, lines: list[dict[str, Any]]) -> None:
    """Strength of every head over training, darker for higher layers."""
    steps = [line["step"] for line in lines]
    layers = len(lines[0]["strengths"])
    for number in range(layers):
        values = np.array([line["strengths"][number] for line in lines])
        colour = LAYERS[min(number * len(LAYERS) // layers, len(LAYERS) - 1)]
        for head in range(values.shape[1]):
            label = f"layer {number + 1}" if head == 0 else None
            axis.plot(steps, values[:, head], color=colour, lw=1.3, label=label)
    axis.axhline(0, color="#888888", lw=1)
    axis.legend(fontsize=7.5, frameon=False)
    axis.set_xlabel("step", fontsize=8)
    axis.set_title("Learned strength of each head over training", fontsize=10)


def draw_heads(axis: Axes, one: dict[str, Any]) -> None:
    """What each head's strength does: rise of perplexity without it, against its size."""
    strengths = [values for name, values in sorted(one["numbers"].items()) if name.endswith("strength_bias")]
    rises = one["set_to_zero"]["heads"]
    for number, (own, rise) in enumerate(zip(strengths, rises, strict=True)):
        colour = LAYERS[min(number * len(LAYERS) // len(strengths), len(LAYERS) - 1)]
        axis.plot(own, [in_per_cent(r) for r in rise], "o", color=colour, ms=7, mec="#08306b", mew=0.6)
    axis.axhline(0, color="#888888", lw=1)
    axis.set_xlabel("learned strength of a head", fontsize=8)
    axis.set_title("Rise of perplexity with that strength at 0, %", fontsize=10)


def page(base: dict[str, Any], methods: dict[str, dict[str, Any]]) -> Iterator[str]:
    rows = [["Original", f"{math.exp(base['loss']):.2f}", "", "", ""]]
    for title, one in methods.items():
        off = one["set_to_zero"]
        layers = ", ".join(f"{in_per_cent(rise):+.0f}" for rise in off.get("layers", []))
        without = f"{in_per_cent(off['all']):+.0f} %" if off else ""
        rises = off.get("kinds", {}).items()
        kinds = ", ".join(f"{KINDS.get(kind, kind)} {in_per_cent(rise):+.0f} %" for kind, rise in rises)
        rows.append([title, f"{math.exp(one['loss']):.2f}", without, kinds, layers])
    yield markdown_table(
        ("method", "perplexity", "with its numbers per head set to 0", "of one kind", "of one layer, %"),
        rows,
    )
    cells: list[list[str]] = []
    for criterion, classes in base["by_kind"].items():
        for name, plain in classes.items():
            found = [one["by_kind"][criterion][name] for one in methods.values()]
            changes = [
                f"{in_per_cent(cell['difference']):+.1f} ± {100 * 1.96 * cell['error']:.1f}" for cell in found
            ]
            cells.append(
                [f"{criterion}: {name}", f"{plain['tokens']:,}", f"{math.exp(plain['base']):.3g}", *changes]
            )
    yield markdown_table(("predicted token", "tokens", "Original", *methods), cells)
    means: list[list[str]] = []
    for title, one in (("Original", base), *methods.items()):
        for state, values in one["statistics"].items():
            if not (title == "Original" and state == "set to 0"):
                numbers = [f"{np.mean(values[name]):.3f}" for name in values]
                means.append([title if state == "as it is" else f"{title}, set to 0", *numbers])
    yield markdown_table(("mean over all heads", *base["statistics"]["as it is"]), means)


def in_per_cent(difference: float) -> float:
    """A difference of losses in nats as per cent of perplexity."""
    return 100 * math.expm1(difference)


if __name__ == "__main__":
    main()

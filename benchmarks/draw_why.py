"""A picture and tables of what ``why_it_helps.py`` found for one or more seeds.

    python benchmarks/draw_why.py why-6.json why-7.json --numbers runs/learned-6/numbers.jsonl --out why

``--numbers``: lines with a step and the numbers per head of every layer, as ``arena_runs.py`` writes them.
Intervals are over seeds; with a single file they are over its texts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from saobp.lab.arena_records import title_of
from saobp.lab.cells import markdown_table
from saobp.lab.figures import save_figure
from saobp.lab.statistics import paired_gain
from saobp.refinement import Refinement
from saobp.storage.atomic import write_atomically

COLOURS = ("#009e73", "#0072b2", "#d55e00", "#cc79a7")
LAYERS = ("#cfe1f2", "#85bcdb", "#3585bf", "#08306b")
STRENGTHS = "strength_bias"
KINDS = {STRENGTHS: "strengths", "variants.temperature.head_bias": "temperatures"} | {
    f"variants.{name}.head_bias": name for name in ("qk-norm", "by-distance", "later-steps")
}
SHOWN = 3
"""Methods in the panel of kinds of tokens; the tables have all."""

Seeds = Sequence[dict[str, Any]]
"""What was found for one method, a dict for each seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("found", type=Path, nargs="+")
    parser.add_argument("--numbers", type=Path)
    parser.add_argument("--out", type=Path, default=Path("why"))
    given = parser.parse_args()
    base, methods = read([json.loads(path.read_text()) for path in given.found])
    course = "" if given.numbers is None else given.numbers.read_text()
    lines = [json.loads(line) for line in course.splitlines()]
    for path in save_figure(picture(methods, lines), given.out):
        print(path)
    write_atomically(given.out.with_suffix(".md"), "\n\n".join(page(base, methods)) + "\n")


def read(files: Sequence[dict[str, Any]]) -> tuple[Seeds, dict[str, Seeds]]:
    """Original and, by title, the methods that all files have."""
    by_seed = []
    for one in files:
        base, *others = one["runs"].values()
        by_seed.append((base, {title_of(method(other["refinement"])): other for other in others}))
    shared = [title for title in by_seed[0][1] if all(title in methods for _, methods in by_seed)]
    return [base for base, _ in by_seed], {title: [own[title] for _, own in by_seed] for title in shared}


def method(config: dict[str, Any]) -> str:
    """The text form of a model's refinement; one without a factor has no strength."""
    return str(Refinement.of({**config, **({"strength": "auto"} if config["factor"] == "none" else {})}))


def picture(methods: dict[str, Seeds], lines: list[dict[str, Any]]) -> Figure:
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
    else:
        course.remove()
    title, first = next(iter(methods.items()))
    draw_heads(heads, first)
    heads.set_title(f"Rise of perplexity with a head's numbers at 0, %\n{title}", fontsize=9)
    return figure


def interval(seeds: Seeds, criterion: str, name: str) -> tuple[float, float, float]:
    """Mean difference from Original of a class of tokens and its 95 % interval, in per cent."""
    cells = [one["by_kind"][criterion][name] for one in seeds if name in one["by_kind"][criterion]]
    differences = {number: cell["difference"] for number, cell in enumerate(cells)}
    gain = paired_gain(differences, dict.fromkeys(differences, 0.0), higher_is_better=False)
    assert gain is not None
    low, high = gain.low, gain.high
    if low is None or high is None:
        low, high = (gain.difference + sign * 1.96 * cells[0]["error"] for sign in (-1, 1))
    mean, low, high = map(in_per_cent, (gain.difference, low, high))
    return mean, low, high


def draw_kinds(axis: Axes, methods: dict[str, Seeds]) -> None:
    """Differences from Original in per cent of perplexity by kind of predicted token."""
    first = next(iter(methods.values()))
    labels: list[str] = []
    row = 0.0
    places, ticks = {}, []
    for criterion, classes in first[0]["by_kind"].items():
        for name in classes:
            places[criterion, name] = row
            labels.append(f"{criterion}: {name}")
            ticks.append(row)
            row += 1
        row += 0.6
    for number, (title, seeds) in enumerate(methods.items()):
        for (criterion, name), place in places.items():
            height = place + 0.2 * (number - (len(methods) - 1) / 2)
            mean, low, high = interval(seeds, criterion, name)
            axis.plot([low, high], [height, height], color=COLOURS[number], lw=1.4)
            label = title if (criterion, name) == next(iter(places)) else None
            axis.plot(mean, height, "o", color=COLOURS[number], ms=4, label=label)
    axis.axvline(0, color="#888888", lw=1)
    axis.set_yticks(ticks, labels, fontsize=7.5)
    axis.invert_yaxis()
    axis.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    over = f"{len(first)} pairs of models" if len(first) > 1 else "texts, one pair of models"
    axis.set_xlabel(f"difference of held-out perplexity from Original, %\n95 % over {over}", fontsize=8)
    axis.set_title("Which tokens gain", fontsize=10, pad=14 + 13 * len(methods))


def draw_course(axis: Axes, lines: list[dict[str, Any]]) -> None:
    """Strength of every head over training, darker for higher layers."""
    steps = [line["step"] for line in lines]
    layers = sorted(name for name in lines[0] if name.endswith(STRENGTHS))
    for number, layer in enumerate(layers):
        values = np.array([line[layer] for line in lines])
        for head in range(values.shape[1]):
            label = f"layer {number + 1}" if head == 0 else None
            axis.plot(steps, values[:, head], color=colour(number, len(layers)), lw=1.3, label=label)
    axis.axhline(0, color="#888888", lw=1)
    axis.legend(fontsize=7.5, frameon=False)
    axis.set_xlabel("step", fontsize=8)
    axis.set_title("Learned strength of each head over training", fontsize=10)


def draw_heads(axis: Axes, seeds: Seeds) -> None:
    """What each head's numbers do: rise of perplexity without them, against its strength."""
    for one in seeds:
        strengths = [values for name, values in sorted(one["numbers"].items()) if name.endswith(STRENGTHS)]
        for number, (own, rise) in enumerate(zip(strengths, one["set_to_zero"]["heads"], strict=True)):
            shade = colour(number, len(strengths))
            axis.plot(own, [in_per_cent(r) for r in rise], "o", color=shade, ms=6, mec="#08306b", mew=0.6)
    axis.axhline(0, color="#888888", lw=1)
    axis.set_xlabel("learned strength of a head", fontsize=8)


def colour(layer: int, layers: int) -> str:
    return LAYERS[min(layer * len(LAYERS) // layers, len(LAYERS) - 1)]


def page(base: Seeds, methods: dict[str, Seeds]) -> Iterator[str]:
    rows = [["Original", perplexity(base), "", "", ""]]
    for title, seeds in methods.items():
        off = [one["set_to_zero"] for one in seeds if one["set_to_zero"]]
        kinds = [
            f"{KINDS.get(kind, kind)} {over_seeds([in_per_cent(one['kinds'][kind]) for one in off], '+.0f')}"
            for kind in (off[0]["kinds"] if off else ())
        ]
        without = over_seeds([in_per_cent(one["all"]) for one in off], "+.0f") if off else ""
        by_layer = np.mean([one["layers"] for one in off], 0) if off else ()
        layers = ", ".join(f"{in_per_cent(rise):+.0f}" for rise in by_layer)
        rows.append([title, perplexity(seeds), without, ", ".join(kinds), layers])
    yield markdown_table(
        ("method", "perplexity", "numbers per head set to 0, %", "those of one kind, %", "of one layer, %"),
        rows,
    )
    cells: list[list[str]] = []
    for criterion, classes in base[0]["by_kind"].items():
        for name, plain in classes.items():
            found = [interval(seeds, criterion, name) for seeds in methods.values()]
            changes = [f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" for mean, low, high in found]
            usual = over_seeds([math.exp(one["by_kind"][criterion][name]["base"]) for one in base], ".3g")
            cells.append([f"{criterion}: {name}", f"{plain['tokens']:,}", usual, *changes])
    yield markdown_table(("predicted token", "tokens", "Original", *methods), cells)
    means: list[list[str]] = []
    for title, seeds in (("Original", base), *methods.items()):
        for state, values in seeds[0]["statistics"].items():
            if not (title == "Original" and state == "set to 0"):
                numbers = [
                    over_seeds([float(np.mean(one["statistics"][state][name])) for one in seeds], ".3f")
                    for name in values
                ]
                means.append([title if state == "as it is" else f"{title}, set to 0", *numbers])
    yield markdown_table(("mean over all heads", *base[0]["statistics"]["as it is"]), means)


def perplexity(seeds: Seeds) -> str:
    return over_seeds([math.exp(one["loss"]) for one in seeds], ".2f")


def over_seeds(values: Sequence[float], form: str) -> str:
    """``1.23``, or ``1.23 (1.20 to 1.27)``: mean and range over seeds."""
    mean = format(float(np.mean(values)), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def in_per_cent(difference: float) -> float:
    """A difference of losses in nats as per cent of perplexity."""
    return 100 * math.expm1(difference)


if __name__ == "__main__":
    main()

"""A picture of learned strengths and temperatures over training, and of strengths alone against both.

    python benchmarks/draw_strengths.py results/arena/strengths.json --out results/arena/strengths
    python benchmarks/draw_strengths.py results/arena/courses.json --out results/arena/courses

The first file: ``course``, lines of a run with a step and the strengths and log temperatures of all heads by
layer; ``final``, pairs of strengths at the end of runs with the same seed, without and with a temperature.
The second: such lines, without temperatures, by the names of recorded runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from saobp.lab.arena_records import method_of, title_of
from saobp.lab.figures import save_figure
from saobp.sizes import FAMILY_NAMES
from saobp.storage.json_files import read_json

RECORDS = Path(__file__).parents[1] / "results" / "arena" / "runs.json"
LAYERS = ("#a6cee3", "#5aa2cf", "#1f6fb2", "#08306b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("found", type=Path)
    parser.add_argument("--out", type=Path, default=Path("strengths"))
    given = parser.parse_args()
    found = json.loads(given.found.read_text())
    for path in save_figure(picture(found) if "course" in found else side_by_side(found), given.out):
        print(path)


def picture(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    draw_course(axes[0], found["course"], "strengths", "strength of each head over training, seed 11")
    draw_course(axes[1], found["course"], "temperatures", "temperature b of each head, same run")
    axes[0].legend(fontsize=7.5, frameon=False)
    draw_pairs(axes[2], found["final"])
    return figure


def side_by_side(courses: dict[str, list[dict[str, Any]]]) -> Figure:
    """Strengths over training, a panel for each run."""
    records = {record["run"]: record for record in read_json(RECORDS)}
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, len(courses), sharey=True, squeeze=False)[0]
    for axis, (run, lines) in zip(axes, courses.items(), strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        recipe = records[run]["recipe"]
        title = title_of(method_of(recipe)).replace(" (", "\n(").replace(" + ", "\n+ ", 1)
        model = f"{FAMILY_NAMES[recipe['family']]}-{recipe['size']}"
        draw_course(axis, lines, "strengths", f"{title}\n{model}, seed {recipe['seed']}")
    layers = axes[0].get_legend_handles_labels()
    figure.legend(*layers, loc="outside right upper", fontsize=7.5, frameon=False)
    axes[0].set_ylabel("strength of each head", fontsize=8)
    return figure


def draw_course(axis: Axes, lines: list[dict[str, Any]], name: str, title: str) -> None:
    """A line per head, darker for higher layers."""
    steps = [line["step"] for line in lines]
    values = np.array([line[name] for line in lines])
    for layer in range(values.shape[1]):
        for head in range(values.shape[2]):
            label = f"layer {layer + 1}" if head == 0 else None
            axis.plot(steps, values[:, layer, head], color=LAYERS[layer % len(LAYERS)], lw=1.2, label=label)
    axis.axhline(0, color="#888888", lw=0.8)
    axis.set_xlabel("step", fontsize=8)
    axis.set_title(title, fontsize=9)


def draw_pairs(axis: Axes, final: dict[str, dict[str, list[list[float]]]]) -> None:
    """Strengths of the same heads without and with a temperature, all seeds."""
    for one in final.values():
        for layer, (alone, beside) in enumerate(zip(one["alone"], one["beside"], strict=True)):
            axis.plot(alone, beside, "o", color=LAYERS[layer % len(LAYERS)], ms=4)
    end = max(axis.get_xlim()[1], axis.get_ylim()[1])
    axis.plot([0, end], [0, end], color="#888888", lw=0.8)
    axis.set_xlabel("strength learned alone", fontsize=8)
    axis.set_ylabel("learned beside a temperature", fontsize=8)
    axis.set_title(f"the same heads at the end, {len(final)} seeds", fontsize=9)


if __name__ == "__main__":
    main()

"""Draws the picture of results/existing-models/ from its records.

python benchmarks/existing_figure.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[1] / "results" / "existing-models"
TASKS = {
    "mean": "mean of the five",
    "sst2": "SST-2",
    "cola": "CoLA",
    "stsb": "STS-B",
    "rte": "RTE",
    "mrpc": "MRPC",
}
CORPORA = {"wikitext2": "WikiText-2", "wikipedia": "Wikipedia"}
ENCODERS = {"minilm": ("MiniLM-L6", "#1f5fa8"), "mpnet": ("mpnet-base", "#2d8a57")}
DECODER = "#c2571a"


def main() -> None:
    found = {name: _read(f"{name}.json") for name in (*ENCODERS, "smollm2")}
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(3, 2, 2.4))
    _differences(left, {name: found[name]["tasks"] for name in ENCODERS if found[name]})
    _losses(middle, found["smollm2"])
    _strengths(right, found)
    figure.savefig(FOLDER / "differences.png", dpi=110)


def _read(name: str) -> dict[str, Any]:
    path = FOLDER / name
    return json.loads(path.read_text()) if path.exists() else {}


def _differences(axis: Axes, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Paired differences of scores with their intervals, tasks by rows."""
    axis.axvline(0, color="#888888", linewidth=1)
    for place, (name, tasks) in enumerate(found.items()):
        title, colour = ENCODERS[name]
        for row, task in enumerate(TASKS):
            if task not in tasks:
                continue
            own, height = tasks[task], row + 0.2 * (place - (len(found) - 1) / 2)
            wide = 3.0 if task == "mean" else 1.4
            if own["low"] is not None:
                axis.plot([own["low"], own["high"]], [height] * 2, color=colour, linewidth=wide)
            label = f"{title}, {tasks['mean']['pairs']} seeds" if task == "mean" else None
            axis.plot(own["difference"], height, "o", color=colour, markersize=5, label=label)
    axis.set_yticks(range(len(TASKS)), list(TASKS.values()), fontsize=8)
    axis.set_ylim(len(TASKS) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", linewidth=0.4, alpha=0.5)
    axis.set_xlabel("score, learned less plain of the same seed; 95 % intervals", fontsize=8)
    axis.set_title("Fine-tuning with learned strengths", fontsize=9, loc="left")
    axis.legend(fontsize=7, frameon=False)


def _losses(axis: Axes, found: Mapping[str, Any]) -> None:
    """Paired differences of the decoder's held-out losses with their intervals and seeds, corpora by rows."""
    after = {(run["corpus"], run["method"], run["seed"]): run["after"] for run in found["runs"]}
    shown = [corpus for corpus in CORPORA if f"{corpus}: learned - plain" in found["comparisons"]]
    axis.axvline(0, color="#888888", linewidth=1)
    for row, corpus in enumerate(shown):
        gain = found["comparisons"][f"{corpus}: learned - plain"]
        seeds = [seed for name, method, seed in after if (name, method) == (corpus, "learned")]
        points = [1000 * (after[corpus, "learned", one] - after[corpus, "plain", one]) for one in seeds]
        axis.plot(points, [row + 0.15] * len(points), "o", color=DECODER, markersize=3, alpha=0.5, mew=0)
        if gain["low"] is not None:
            axis.plot([1000 * gain["low"], 1000 * gain["high"]], [row] * 2, color=DECODER, linewidth=3.0)
        axis.plot(1000 * gain["difference"], row, "o", color=DECODER, markersize=5)
    tokens = {run["corpus"]: run["tokens"] for run in found["runs"] if run["method"] == "learned"}
    titles = [f"{CORPORA[name]},\n{tokens[name] / 1e6:.1f} M tokens" for name in shown]
    axis.set_yticks(range(len(shown)), titles, fontsize=8)
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", linewidth=0.4, alpha=0.5)
    axis.set_xlabel("loss in 1/1000 nats, learned less plain", fontsize=8)
    axis.set_title("SmolLM2 trained on", fontsize=9, loc="left")


def _strengths(axis: Axes, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Where strengths end, by layer as a share of the depth."""
    series = {
        ENCODERS[name]: [layers for seeds in found[name]["strengths"].values() for layers in seeds.values()]
        for name in ENCODERS
        if found[name]
    }
    runs = found["smollm2"]["runs"]
    last = [corpus for corpus in CORPORA if any(run["corpus"] == corpus for run in runs)][-1]
    runs = [run for run in runs if run["corpus"] == last]
    ways = {"learned": ("SmolLM2", DECODER), "strengths": ("SmolLM2, strengths alone", "#8a4fa3")}
    for method, shown in ways.items():
        series[shown] = [run["strengths"] for run in runs if run["method"] == method]
    axis.axhline(0, color="#888888", linewidth=1)
    for (title, colour), own in series.items():
        for number, layers in enumerate(own):
            for layer, heads in enumerate(layers):
                label = title if number == layer == 0 else None
                depth = [layer / (len(layers) - 1)] * len(heads)
                axis.plot(depth, heads, "o", color=colour, markersize=2.5, alpha=0.3, mew=0, label=label)
    axis.set_xlabel("depth of the layer, first to last", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.set_title("Strengths at the end", fontsize=9, loc="left")
    for mark in axis.legend(fontsize=7, frameon=False).legend_handles:
        mark.set(alpha=1.0, markersize=5)


if __name__ == "__main__":
    main()

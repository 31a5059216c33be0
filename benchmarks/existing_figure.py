"""Draws the picture of results/existing-models/ from its records.

python benchmarks/existing_figure.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
DECODER, ALONE, TEMPERATURE = "#c2571a", "#8a4fa3", "#999999"
SHOWN = (-5.0, 10.5)
"""Differences of scores that the axis has room for; what lies outside is written beside its row."""


def main() -> None:
    found = {name: _read(f"{name}.json") for name in (*ENCODERS, "smollm2")}
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    left, right = figure.subfigures(1, 2, wspace=0.02)
    scores, losses, falls = left.subplots(3, 1, height_ratios=(4.6, 1.3, 1.8))
    beside, alone = right.subplots(2, 1, sharex=True)
    _differences(scores, {name: found[name]["tasks"] for name in ENCODERS if found[name]})
    _losses(losses, found["smollm2"])
    _falls(falls, found["smollm2"])
    _strengths(beside, _beside_weights(found), "Strengths at the end, trained beside the weights")
    _strengths(
        alone,
        {("SmolLM2, weights frozen", ALONE): _ends(found["smollm2"], "strengths")},
        "Trained alone, 10 M tokens of Wikipedia",
    )
    alone.set_xlabel("depth of the layer, first to last; a dot is a head in one run", fontsize=9)
    figure.savefig(FOLDER / "differences.png", dpi=110)


def _read(name: str) -> dict[str, Any]:
    path = FOLDER / name
    return json.loads(path.read_text()) if path.exists() else {}


def _differences(axis: Axes, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Paired differences of scores with their intervals and seeds, tasks by rows."""
    axis.axvline(0, color="#888888", linewidth=1)
    for place, (name, tasks) in enumerate(found.items()):
        title, colour = ENCODERS[name]
        for row, task in enumerate(TASKS):
            own, height = tasks[task], row + 0.36 * (place - (len(found) - 1) / 2)
            plain, learned = own["scores"]["plain"], own["scores"]["learned"]
            pairs = {seed: learned[seed] - plain[seed] for seed in plain}
            label = f"{title}, {own['pairs']} seeds" if task == "mean" else None
            wide = 3.5 if task == "mean" else 1.6
            axis.plot([own["low"], own["high"]], [height] * 2, color=colour, linewidth=wide, alpha=0.8)
            axis.plot(list(pairs.values()), [height] * len(pairs), "|", color=colour, markersize=7, mew=1)
            axis.plot(own["difference"], height, "o", color=colour, markersize=6, label=label)
            outside = [
                f"seed {seed}: {one:+.1f}" for seed, one in pairs.items() if not SHOWN[0] < one < SHOWN[1]
            ]
            if outside:
                words = ", ".join([f"[{own['low']:+.1f}, {own['high']:+.1f}]", *outside])
                axis.text(
                    SHOWN[1] - 0.1, height + 0.3, words, color=colour, fontsize=8, ha="right", va="center"
                )
    axis.set_xlim(*SHOWN)
    _rows(axis, list(TASKS.values()))
    axis.set_xlabel("score, learned less plain of the same seed (ticks), mean and 95 % interval", fontsize=9)
    axis.set_title("Fine-tuning with learned strengths", fontsize=10, loc="left")
    axis.legend(fontsize=8, frameon=False, loc="lower right")


def _rows(axis: Axes, titles: list[str]) -> None:
    axis.set_yticks(range(len(titles)), titles, fontsize=9)
    axis.set_ylim(len(titles) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", linewidth=0.4, alpha=0.5)


def _losses(axis: Axes, found: Mapping[str, Any]) -> None:
    """Paired differences of the decoder's held-out losses with their intervals and seeds, corpora by rows."""
    after = {(run["corpus"], run["method"], run["seed"]): run["after"] for run in found["runs"]}
    shown = [corpus for corpus in CORPORA if f"{corpus}: learned - plain" in found["comparisons"]]
    axis.axvline(0, color="#888888", linewidth=1)
    for row, corpus in enumerate(shown):
        gain = found["comparisons"][f"{corpus}: learned - plain"]
        seeds = [seed for name, method, seed in after if (name, method) == (corpus, "learned")]
        points = [1000 * (after[corpus, "learned", one] - after[corpus, "plain", one]) for one in seeds]
        axis.plot(
            [1000 * gain["low"], 1000 * gain["high"]], [row] * 2, color=DECODER, linewidth=3.5, alpha=0.8
        )
        axis.plot(points, [row] * len(points), "|", color=DECODER, markersize=9, mew=1)
        axis.plot(1000 * gain["difference"], row, "o", color=DECODER, markersize=6)
    tokens = {run["corpus"]: run["tokens"] for run in found["runs"] if run["method"] == "learned"}
    _rows(axis, [f"{CORPORA[name]},\n{tokens[name] / 1e6:.1f} M tokens" for name in shown])
    axis.set_xlabel(
        "held-out loss in 1/1000 nats per token, learned less plain; below 0 is better", fontsize=9
    )
    axis.set_title("SmolLM2 trained on", fontsize=10, loc="left")


def _falls(axis: Axes, found: Mapping[str, Any]) -> None:
    """How far numbers per head, trained alone, lower the decoder's held-out loss; corpora by rows."""
    longer = "strengths alone, 50 M tokens"
    runs = {
        "WikiText-2,\n2.5 M tokens": [run for run in found["runs"] if run["corpus"] == "wikitext2"],
        "Wikipedia,\n10 M tokens": [run for run in found["runs"] if run["corpus"] == "wikipedia"],
        "Wikipedia,\n50 M tokens": found[longer]["runs"],
    }
    for row, own in enumerate(runs.values()):
        for shift, (method, colour) in ((-0.17, ("strengths", ALONE)), (0.17, ("temperatures", TEMPERATURE))):
            ends = [1000 * (run["after"] - run["before"]) for run in own if run["method"] == method]
            label = f"{method} alone" if row == 0 else None
            if ends:
                mean = sum(ends) / len(ends)
                axis.barh(row + shift, mean, 0.3, color=colour, alpha=0.8, label=label)
                axis.text(mean, row + shift, f" {mean:.1f} ", fontsize=8, ha="right", va="center")
    axis.axvline(0, color="#888888", linewidth=1)
    _rows(axis, list(runs))
    axis.set_xlim(left=-72)
    axis.set_xlabel("held-out loss in 1/1000 nats per token, less that of the model as it was", fontsize=9)
    axis.set_title("SmolLM2, weights frozen, one number per head trained", fontsize=10, loc="left")
    axis.legend(fontsize=8, frameon=False, loc="lower left")


Series = Mapping[tuple[str, str], Sequence[Sequence[Sequence[float]]]]
"""Strengths of runs, layers and heads by title and colour."""


def _beside_weights(found: Mapping[str, Mapping[str, Any]]) -> Series:
    series = {
        ENCODERS[name]: [layers for seeds in found[name]["strengths"].values() for layers in seeds.values()]
        for name in ENCODERS
        if found[name]
    }
    return {("SmolLM2", DECODER): _ends(found["smollm2"], "learned"), **series}


def _ends(found: Mapping[str, Any], method: str) -> list[list[list[float]]]:
    """The decoder's strengths on the last corpus that was run."""
    last = [corpus for corpus in CORPORA if any(run["corpus"] == corpus for run in found["runs"])][-1]
    return [run["strengths"] for run in found["runs"] if (run["corpus"], run["method"]) == (last, method)]


def _strengths(axis: Axes, series: Series, title: str) -> None:
    """Where strengths end, by layer as a share of the depth; series stand beside each other."""
    axis.axhline(0, color="#888888", linewidth=1)
    for place, ((name, colour), runs) in enumerate(series.items()):
        shift = 0.008 * (place - (len(series) - 1) / 2)
        depth = [
            layer / (len(run) - 1) + shift for run in runs for layer, heads in enumerate(run) for _ in heads
        ]
        ends = [one for run in runs for heads in run for one in heads]
        axis.plot(depth, ends, "o", color=colour, markersize=3, alpha=0.35, mew=0, label=name)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", linewidth=0.4, alpha=0.5)
    axis.set_title(title, fontsize=10, loc="left")
    for mark in axis.legend(fontsize=8, frameon=False, loc="upper right").legend_handles:
        mark.set(alpha=1.0, markersize=5)


if __name__ == "__main__":
    main()

"""Draws the picture of docs/which-strength.md from the records in results/.

python benchmarks/which_strength.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from saobp.lab.arena_records import method_of

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "images" / "which-strength.png"
FIXED = (0.02, 0.05, 0.1, 0.2)
SEEDS = {42: "o", 1: "s", 2: "^"}
ARENA_SEEDS = {None: (42, 1, 2, 3, 4, 5), 0.15: (11, 12, 13, 14, 15, 16, 17, 18)}
"""By the masked share at the end: None for 15 % throughout."""


def main() -> None:
    runs = json.loads((ROOT / "results" / "strengths" / "mini-runs.json").read_text())
    arena = json.loads((ROOT / "results" / "arena" / "runs.json").read_text())
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    methods = [None, *FIXED, "learned"]
    losses = {method: by_seed(runs, method) for method in methods}
    plain = losses[None]
    for place, method in enumerate(methods[1:]):
        differences = {seed: losses[method][seed] - plain[seed] for seed in plain}
        colour = "#2d8a57" if method == "learned" else "#1f5fa8"
        for seed, mark in SEEDS.items():
            left.plot(place, differences[seed], mark, color=colour, markersize=5, alpha=0.7)
        left.hlines(mean(differences.values()), place - 0.22, place + 0.22, color=colour, linewidth=2)
    left.axhline(0, color="#999999", linewidth=0.8)
    left.set_xticks(range(len(methods) - 1), [str(method) for method in methods[1:]])
    left.set_xlabel("strength of high", fontsize=8)
    left.set_ylabel("perplexity above plain, same seed", fontsize=8)
    left.set_title("BERT-mini: one mark per seed, bar: mean", fontsize=9, loc="left")
    learned = {
        "BERT-mini": ([run for run in runs if strength_of(run) == "learned"], "#1f5fa8", -0.1),
        "ModernBERT-mini": (
            [run for run in arena if is_shown(run)],
            "#c2571a",
            0.1,
        ),
    }
    for name, (own, colour, shift) in learned.items():
        for count, run in enumerate(own):
            for layer, heads in enumerate(run["result"]["strengths"]):
                label = f"{name}, {len(own)} seeds" if count == layer == 0 else None
                where = [layer + shift] * len(heads)
                right.plot(where, heads, "o", color=colour, markersize=4, alpha=0.45, mew=0, label=label)
    right.axhspan(0.05, 0.2, color="#e5d9a8", alpha=0.6, lw=0, zorder=0)
    right.text(-0.22, 0.055, "the paper's 0.05 to 0.2", fontsize=7)
    right.axhline(0.02, color="#999999", linewidth=0.8, linestyle=":")
    right.text(-0.22, 0.0215, "auto at 110 million parameters", fontsize=7)
    right.set_yscale("log")
    right.set_ylim(0.015, 30)
    right.set_yticks([0.02, 0.05, 0.2, 1, 5], ["0.02", "0.05", "0.2", "1", "5"])
    right.minorticks_off()
    right.set_xticks(range(4))
    right.set_xlabel("layer", fontsize=8)
    right.set_ylabel("strength after training", fontsize=8)
    right.set_title("high:learned: one dot per head", fontsize=9, loc="left")
    right.legend(fontsize=7, frameon=False, loc="upper left", ncols=2)
    for panel in (left, right):
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(OUT, dpi=110)


def is_shown(run: dict) -> bool:
    """A run of ModernBERT-mini on three corpora, 128 tokens, and a seed of ARENA_SEEDS."""
    recipe = run["recipe"]
    setting = recipe["family"], recipe["size"], recipe["length"], recipe["corpus"].count(",")
    seeds = ARENA_SEEDS[recipe["masked_share_end"]]
    is_learned = method_of(recipe) == "high:learned"
    return is_learned and setting == ("modernbert", "mini", 128, 2) and run["seed"] in seeds


def strength_of(run: dict) -> object:
    refinement = run["recipe"]["refinement"]
    return None if refinement is None else refinement["strength"]


def by_seed(runs: list[dict], strength: object) -> dict[int, float]:
    return {run["seed"]: run["result"]["eval_perplexity"] for run in runs if strength_of(run) == strength}


if __name__ == "__main__":
    main()

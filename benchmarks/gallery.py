"""Measures trained models for docs/gallery.md and draws its pictures.

    python benchmarks/gallery.py measure --models MODELS --texts FILE.parquet --stsb FILE.parquet --out FOLDER
    python benchmarks/gallery.py draw

MODELS holds the folders minilm, mpnet, smollm2 and stories260K; those that are missing are left out. Of a
Parquet file the first paragraphs of at least 1,000 characters are taken, of a text file the first.
Numbers go to --out as CSV; pictures are drawn from those of benchmarks/results/gallery/, to docs/images/.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from pyarrow import parquet
from scipy.stats import spearmanr
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import saobp
from saobp.metrics.diagnosis.diagnose import diagnose
from saobp.metrics.diagnosis.loading import read_texts
from saobp.metrics.health.verdicts import uniform_map

ROOT = Path(__file__).parents[1]
NUMBERS, IMAGES = ROOT / "benchmarks" / "results" / "gallery", ROOT / "docs" / "images"
TITLES = {
    "minilm": "all-MiniLM-L6-v2",
    "mpnet": "all-mpnet-base-v2",
    "smollm2": "SmolLM2-135M-Instruct",
    "stories260K": "stories260K",
}
REFINED = (0.2, 1.0)
LONG = 1000
"""Characters of a paragraph, at least."""
STRENGTHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
STATISTICS = ("gtd", "indirect_entropy", "attention_entropy", "sink_mass", "cross_layer_gtd")
COLOURS = {"minilm": "#1f5fa8", "mpnet": "#2d8a57", "smollm2": "#c2571a", "stories260K": "#8a4fa3"}
VERDICTS = {
    "healthy": "#cfe6c9",
    "borderline": "#ecebe4",
    "diffuse": "#a9c6e6",
    "sink": "#f2d675",
    "localised": "#e9a27e",
    "undefined": "#c9a6d6",
}
LETTERS = {
    "first token": "1",
    "previous token": "P",
    "next token": "N",
    "self": "S",
    "delimiter": "D",
    "duplicate token": "R",
    "induction": "I",
}


def measure(models: Path, texts: Path, stsb: Path | None, out: Path, count: int, tokens: int) -> None:
    """Heads of every model, plain and refined, and what strength does to the model's task."""
    paragraphs = _paragraphs(texts, count)
    heads, losses = [], []
    for name in TITLES:
        folder = models / name
        if not (folder / "config.json").exists():
            print(f"{name} is not in {models} and is left out")
            continue
        start = time.monotonic()
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        own = _stories(folder, tokenizer, count) if name == "stories260K" else paragraphs
        lengths = [len(tokenizer(text, truncation=True, max_length=tokens).input_ids) for text in own]
        causal = name in ("smollm2", "stories260K")
        largest = float(uniform_map(torch.tensor(lengths), causal=causal).entropy.mean())
        for strength in (0.0, *REFINED):
            model = AutoModel.from_pretrained(folder)
            if strength:
                saobp.apply(model, f"high:{strength}")
            found = diagnose(model, tokenizer, own, subject=name, statistics=STATISTICS, length=tokens)
            for head in found.heads:
                record = {"model": name, "strength": strength, **head.to_dict()}
                record["entropy_share"] = head.values["attention_entropy"] / largest
                record["across"] = found.across_layers.get(head.layer, math.nan)
                heads.append({key: _rounded(value) for key, value in record.items() if key != "name"})
        _write(out / "heads.csv", heads)
        if not causal and stsb is not None:
            losses += _similarity(name, folder, tokenizer, stsb)
        elif causal:
            losses += _perplexity(name, folder, tokenizer, own, tokens)
        _write(out / "strengths.csv", losses)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


def _paragraphs(path: Path, count: int) -> list[str]:
    if path.suffix != ".parquet":
        return read_texts(path, count)
    rows = (row.strip() for row in parquet.read_table(path).column("text").to_pylist())
    return [row for row in rows if len(row) >= LONG][:count]


def _stories(folder: Path, tokenizer: Any, count: int) -> list[str]:
    """Stories that the model tells itself: it knows no other text."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    begin = torch.full((count, 1), tokenizer.bos_token_id)
    ids = model.generate(begin, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=200, use_cache=True)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]


def _perplexity(name: str, folder: Path, tokenizer: Any, texts: list[str], tokens: int) -> list[dict]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = [
        tokenizer(text, truncation=True, max_length=tokens, return_tensors="pt").input_ids for text in texts
    ]
    found = []
    for strength in STRENGTHS:
        saobp.apply(model, f"high:{strength}")
        with torch.no_grad():
            parts = [
                functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")
                for ids in rows
            ]
        loss = float(sum(parts)) / sum(ids.shape[1] - 1 for ids in rows)
        found.append({"model": name, "strength": strength, "measure": "loss", "value": round(loss, 4)})
    return found


def _similarity(name: str, folder: Path, tokenizer: Any, stsb: Path) -> list[dict]:
    """STS-B of mean-pooled embeddings, and their cosine with those of the model as it was trained."""
    import pandas

    data = pandas.read_parquet(stsb).head(500)
    sentences = [*data["sentence1"], *data["sentence2"]]
    model = AutoModel.from_pretrained(folder).eval()
    found, plain = [], None
    for strength in STRENGTHS:
        saobp.apply(model, f"high:{strength}")
        parts = []
        for start in range(0, len(sentences), 100):
            batch = tokenizer(
                sentences[start : start + 100], padding=True, truncation=True, return_tensors="pt"
            )
            with torch.no_grad():
                states = model(**batch).last_hidden_state
            mask = batch.attention_mask[..., None]
            parts.append(functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        embeddings = torch.cat(parts)
        plain = embeddings if plain is None else plain
        first, second = embeddings.chunk(2)
        score = 100 * float(spearmanr((first * second).sum(-1), data["label"]).statistic)
        kept = float((embeddings * plain).sum(-1).mean())
        for what, value in (("STS-B Spearman", score), ("cosine with plain", kept)):
            found.append({"model": name, "strength": strength, "measure": what, "value": round(value, 4)})
    return found


def draw() -> None:
    """All pictures, from the numbers."""
    heads, losses = _read("heads.csv"), _read("strengths.csv")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, figure in {
        "gallery-heads.png": _heads(heads),
        "gallery-layers.png": _layers(heads),
        "gallery-refined.png": _refined(heads),
        "gallery-strength.png": _breaking(losses),
    }.items():
        figure.savefig(IMAGES / name, dpi=110)


def _heads(rows: list[dict]) -> Figure:
    names = [name for name in TITLES if any(row["model"] == name for row in rows)]
    shapes = {name: _shape([row for row in rows if row["model"] == name]) for name in names}
    figure = Figure(figsize=(9.6, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(12, 6), width_ratios=(9, 12, 12))
    places = {
        "smollm2": grid[:, 0],
        "mpnet": grid[0, 1],
        "minilm": grid[1, 1],
        "stories260K": grid[1, 2],
    }
    order = list(VERDICTS)
    for name in names:
        panel = figure.add_subplot(places[name])
        layers, count = shapes[name]
        cells = numpy.full((layers, count), numpy.nan)
        for row in rows:
            if row["model"] == name and float(row["strength"]) == 0:
                layer, head = int(row["layer"]), int(row["head"])
                cells[layer, head] = order.index(row["verdict"])
                if row["kind"]:
                    mark = panel.text(
                        head, layer, LETTERS[row["kind"]], ha="center", va="center", fontsize=6.5
                    )
                    mark.set_path_effects([withStroke(linewidth=1.2, foreground="white")])
        colours = ListedColormap(list(VERDICTS.values()))
        panel.imshow(cells, cmap=colours, vmin=-0.5, vmax=len(order) - 0.5, aspect="auto")
        panel.set_xticks(numpy.arange(-0.5, count), minor=True)
        panel.set_yticks(numpy.arange(-0.5, layers), minor=True)
        panel.grid(which="minor", color="white", linewidth=1.2)
        panel.tick_params(which="both", length=0, labelsize=7)
        panel.set_xticks(range(0, count, 2 if count < 10 else 3))
        panel.set_yticks(range(0, layers, 1 if layers < 8 else 3))
        panel.set_title(TITLES[name], fontsize=9, loc="left")
        panel.set_xlabel("head", fontsize=8)
        panel.set_ylabel("layer", fontsize=8)
        for side in panel.spines.values():
            side.set_visible(False)
    legend = figure.add_subplot(grid[0, 2])
    legend.axis("off")
    patches = [Patch(color=colour, label=word) for word, colour in VERDICTS.items() if word != "undefined"]
    legend.add_artist(
        legend.legend(handles=patches, title="verdict", loc="upper left", fontsize=8, frameon=False)
    )
    letters = [Patch(alpha=0, label=f"{letter}   {kind}") for kind, letter in LETTERS.items()]
    legend.legend(
        handles=letters,
        title="kind",
        loc="lower left",
        fontsize=8,
        frameon=False,
        handlelength=0,
        handletextpad=0,
    )
    return figure


def _layers(rows: list[dict]) -> Figure:
    figure = Figure(figsize=(9.6, 2.9), layout="constrained")
    panels = figure.subplots(1, 3)
    kinds = {
        "entropy: share of even rows": lambda row: float(row["entropy_share"]),
        "sink mass": lambda row: float(row["sink_mass"]),
        "GTD across layers": lambda row: float(row["across"]),
    }
    for panel, (title, value) in zip(panels, kinds.items(), strict=True):
        for name in TITLES:
            own = [row for row in rows if row["model"] == name and float(row["strength"]) == 0]
            if not own:
                continue
            layers, _ = _shape(own)
            means = [
                numpy.mean([value(row) for row in own if int(row["layer"]) == layer])
                for layer in range(layers)
            ]
            depth = numpy.linspace(0, 1, layers)
            panel.plot(
                depth, means, "o-", markersize=2.5, linewidth=1.3, color=COLOURS[name], label=TITLES[name]
            )
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_xlabel("depth: first layer to last", fontsize=8)
        panel.set_ylim(0, 1.02)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].legend(fontsize=7, frameon=False)
    return figure


def _refined(rows: list[dict]) -> Figure:
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    names = [name for name in TITLES if any(row["model"] == name for row in rows)]
    panels = numpy.atleast_1d(figure.subplots(1, len(names)))
    for panel, name in zip(panels, names, strict=True):
        own = {
            strength: {
                (row["layer"], row["head"]): float(row["sink_mass"])
                for row in rows
                if row["model"] == name and float(row["strength"]) == strength
            }
            for strength in (0.0, *REFINED)
        }
        most = 1.04 * max(own[0.0].values())
        panel.plot([0, most], [0, most], color="#bbbbbb", linewidth=0.8)
        for strength, colour in zip(REFINED, ("#4c8fce", "#c2571a"), strict=True):
            before, after = (list(own[key].values()) for key in (0.0, strength))
            panel.scatter(
                before, after, s=9, color=colour, alpha=0.65, linewidths=0, label=f"high:{strength:g}"
            )
        panel.set_title(TITLES[name], fontsize=9, loc="left")
        panel.set_xlabel("sink mass as trained", fontsize=8)
        panel.set_xlim(0, most)
        panel.set_ylim(0, most)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("sink mass refined", fontsize=8)
    panels[0].legend(fontsize=8, frameon=False)
    return figure


def _breaking(rows: list[dict]) -> Figure:
    figure = Figure(figsize=(9.6, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in ("smollm2", "stories260K"):
        own = [row for row in rows if row["model"] == name]
        if own:
            plain = float(own[0]["value"])
            values = [float(row["value"]) - plain for row in own[1:]]
            left.plot(
                [float(row["strength"]) for row in own[1:]],
                values,
                "o-",
                color=COLOURS[name],
                label=TITLES[name],
            )
    left.set_title("decoders: loss above that as trained, nats per token", fontsize=9, loc="left")
    kinds = {
        "STS-B Spearman": ("o-", "STS-B score, share kept"),
        "cosine with plain": ("s--", "cosine with embeddings as trained"),
    }
    for name in ("minilm", "mpnet"):
        for what, (style, label) in kinds.items():
            own = [row for row in rows if row["measure"] == what and row["model"] == name]
            if own:
                right.plot(
                    [float(row["strength"]) for row in own[1:]],
                    [float(row["value"]) / float(own[0]["value"]) for row in own[1:]],
                    style,
                    color=COLOURS[name],
                    markersize=4,
                    label=f"{TITLES[name]}: {label}",
                )
    right.set_title("encoders: what is left of score and embeddings", fontsize=9, loc="left")
    for panel in (left, right):
        panel.set_xscale("log")
        panel.set_xticks(STRENGTHS[1:], [f"{one:g}" for one in STRENGTHS[1:]])
        panel.minorticks_off()
        panel.set_xlabel("strength of high, fixed, without training", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.legend(fontsize=8, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _shape(rows: list[dict]) -> tuple[int, int]:
    return 1 + max(int(row["layer"]) for row in rows), 1 + max(int(row["head"]) for row in rows)


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if rows:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def _read(name: str) -> list[dict]:
    with (NUMBERS / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "draw"))
    parser.add_argument("--models", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--stsb", type=Path, default=None)
    parser.add_argument("--out", type=Path, help="folder for the numbers")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192)
    options = parser.parse_args()
    if options.what == "draw":
        draw()
    elif None in (options.models, options.texts, options.out):
        parser.error("measure takes --models, --texts and --out")
    else:
        measure(options.models, options.texts, options.stsb, options.out, options.count, options.tokens)


if __name__ == "__main__":
    main()

"""Synthetic run folders in the format of training, written in milliseconds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy

ENVIRONMENT = {
    "python": "3.12.3",
    "torch": "2.11.0",
    "transformers": "5.17.0",
    "saobp": "0.1.0",
    "hardware": "made up",
    "processes": 1,
}


def make_run(
    folder: Path,
    *,
    family: str = "bert",
    refinement: dict[str, Any] | None = None,
    steps: int = 2000,
    layers: int = 4,
    heads: int = 8,
    seed: int = 42,
    measured: int = 11,
) -> Path:
    """A finished pretraining run: a falling loss, and heads that settle, some of them badly."""
    random = numpy.random.default_rng(seed)
    gain = 0.06 if refinement else 0.0
    folder.mkdir(parents=True, exist_ok=True)
    recipe = {
        "kind": "pretrain",
        "family": family,
        "size": "mini",
        "length": 128,
        "batch": 256,
        "steps": steps,
        "learning_rate": 1e-3,
        "seed": seed,
        "corpora": {"wikipedia_en": 0.5, "gutenberg_books": 0.5},
        "refinement": refinement,
    }
    write_json(folder / "recipe.json", recipe)
    write_json(folder / "record.json", record(seed, seconds=steps * 0.05))
    loss = 0.0
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(10, steps + 1, 10):
            loss = 3.1 - gain + 6.5 * math.exp(-4 * step / steps) + float(random.normal(0, 0.04))
            line = {
                "step": step,
                "tokens": step * 256 * 128,
                "seconds": round(step * 0.05, 2),
                "loss": loss,
                "learning_rate": 1e-3 * min(1, step / (0.05 * steps)) * (1 - step / (steps + 1)),
            }
            file.write(json.dumps(line) + "\n")
            if step % max(10, steps // 100 * 10) == 0:
                held_out = loss + 0.05
                evaluated = {"step": step, "eval_loss": held_out, "eval_perplexity": math.exp(held_out)}
                file.write(json.dumps(evaluated) + "\n")
    _write_health(folder / "health.jsonl", random, steps, layers, heads, measured, refinement)
    write_json(
        folder / "result.json",
        {"steps": steps, "loss": loss, "eval_loss": loss + 0.05, "eval_perplexity": math.exp(loss + 0.05)},
    )
    return folder


def make_finetune(folder: Path) -> Path:
    """A finished fine-tuning run with a folder for each seed."""
    folder.mkdir(parents=True, exist_ok=True)
    scores, steps = {}, 300
    for seed in (42, 43, 44):
        random = numpy.random.default_rng(seed)
        own = folder / f"seed-{seed}"
        own.mkdir(exist_ok=True)
        write_json(
            own / "recipe.json",
            {"kind": "finetune", "task": "sst2", "model": "runs/high/model", "refinement": None},
        )
        write_json(own / "record.json", record(seed, seconds=30.0))
        lines = [
            {"step": step, "loss": 0.7 * math.exp(-3 * step / steps) + float(abs(random.normal(0, 0.02)))}
            for step in range(10, steps + 1, 10)
        ]
        lines.insert(len(lines) // 2, {"step": steps // 2, "eval_accuracy": 0.82})
        lines.append({"step": steps, "eval_accuracy": 0.87 + float(random.normal(0, 0.01))})
        (own / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        best = lines[-1]["eval_accuracy"]
        scores[str(seed)] = {"best": best, "last": best, "best_epoch": 3}
    values = numpy.array([score["best"] for score in scores.values()])
    summary = {"mean": float(values.mean()), "std": float(values.std(ddof=1))}
    write_json(
        folder / "result.json",
        {"task": "sst2", "metric": "accuracy", "seeds": scores, "best": summary, "last": summary},
    )
    return folder


def record(seed: int, *, seconds: float) -> dict[str, Any]:
    return {
        "status": "finished",
        "command": "saobp pretrain --recipe tiny",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "started": "2026-01-05T09:00:00+00:00",
        "finished": "2026-01-05T09:01:40+00:00",
        "seconds": seconds,
        "seed": seed,
        "data": {"wikipedia_en": "ab" * 32, "gutenberg_books": "cd" * 32},
        "environment": ENVIRONMENT,
    }


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _write_health(
    path: Path,
    random: numpy.random.Generator,
    steps: int,
    layers: int,
    heads: int,
    measured: int,
    refinement: dict[str, Any] | None,
) -> None:
    """Heads start diffuse and settle: most well, early layers localised, late ones towards a sink."""
    depth = numpy.linspace(0, 1, layers)[:, None]
    end = numpy.clip(0.45 + 0.35 * depth + random.normal(0, 0.12, (layers, heads)), 0.05, 0.95)
    if refinement:
        end = numpy.clip(end + 0.6 * (0.7 - end), 0, 1)
    learned = random.normal(0.6, 0.4, (layers, heads)) * depth
    with path.open("w", encoding="utf-8") as file:
        for moment in range(measured):
            share = moment / max(1, measured - 1)
            gtd = 0.855 + (end - 0.855) * (1 - math.exp(-4 * share))
            statistics = {
                "gtd": gtd,
                "indirect_entropy": 4.6 * (0.5 + 0.5 * gtd),
                "attention_entropy": 4.85 * gtd**1.5,
                "sink_mass": numpy.clip(
                    0.02 + (0.1 + 0.6 * depth) * share * random.uniform(0, 1, gtd.shape), 0, 1
                ),
            }
            line = {
                "step": round(share * steps),
                "layers": [f"encoder.layer.{layer}.attention.self" for layer in range(layers)],
                "statistics": {name: values.round(5).tolist() for name, values in statistics.items()},
                "cross_layer_gtd": (0.9 * gtd[1:].mean(1)).round(5).tolist(),
                "strengths": (learned * share).round(5).tolist() if refinement else None,
            }
            file.write(json.dumps(line) + "\n")

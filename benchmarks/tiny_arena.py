"""Methods that no GPU has trained yet, in a tiny encoder on a CPU: a look that orders the runs on a GPU.

    saobp tokenize wikitext2_raw --tokenizer train:4096 --data-dir DATA --out tokens
    python benchmarks/tiny_arena.py run --tokens tokens --out runs/tiny --workers 2
    saobp arena runs/tiny/runs --out results/tiny --fresh 71,72,73,74,75:5

Trains all methods, one seed after the other; a second call goes on with what is missing. Rules:
results/tiny/arena/notes.md.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from paired_runs import claimed, run_workers

from saobp.refinement import Refinement
from saobp.runs.layout import RESULT
from saobp.runs.worker_processes import end_with_parent
from saobp.training.recipes import PretrainRecipe, named_recipe

STRENGTHS_RATE = 0.01
"""Learning rate of numbers per head, as in the runs on a GPU."""
SEEDS = (71, 72, 73, 74, 75)
LEARNED = "high:learned"
METHODS: dict[str, dict[str, Any]] = (
    {"none": {}}
    | {
        name: {"refinement": Refinement.of(name)}
        for name in (
            *(LEARNED, "sinkhorn", "sinkhorn-3", "gate", "sink", "softmax-plus-one", "sigma-reparam"),
            *(f"{LEARNED}+{part}" for part in ("message-gate", "by-distance", "alternating")),
            f"{LEARNED},steps=2+later-steps",
        )
    }
    | {
        "later": {"refinement": Refinement.of(LEARNED), "strength_delay": 0.2},
        "faster": {"refinement": Refinement.of(LEARNED), "strength_rate": 4.0},
        "entropy": {"regularizer": "entropy,weight=0.001"},
        "eigen": {"regularizer": "eigen,weight=0.01"},
    }
)
"""Fields of the recipe that a method changes; ``strength_rate`` is a multiple of STRENGTHS_RATE here."""

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def run(
    tokens: Annotated[Path, typer.Option(help="Folder of the token store and its tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder for the runs.")],
    workers: Annotated[int, typer.Option(help="Processes at a time.", min=1)] = 2,
) -> None:
    """Train what has not been trained."""
    cells = [(method, seed) for seed in SEEDS for method in METHODS]
    left = [cell for cell in cells if not (out / "runs" / name_of(*cell) / RESULT).exists()]
    run_workers(__file__, out, [str(tokens), left], workers)


def name_of(method: str, seed: int) -> str:
    for character in ":,+=":
        method = method.replace(character, "-")
    return f"modernbert-tiny-{method}-{seed}"


def recipe_of(method: str, seed: int) -> PretrainRecipe:
    """The recipe ``modern`` for 1.2 million tokens in sequences of 64, in float32, not compiled."""
    usual = named_recipe("modern", "modernbert", "tiny")
    fields: dict[str, Any] = {
        **{"steps": 600, "batch_size": 32, "length": 64, "warmup_steps": 30, "evaluation_rows": 1024},
        **{"log_steps": 50, "evaluation_steps": 600, "checkpoint_steps": 600, "health_texts": 0},
        **{"precision": "fp32", "compiled": False, "corpus": "wikitext2_raw", "seed": seed},
        "strength_rate": 1.0,
        **METHODS[method],
    }
    fields["strength_rate"] *= STRENGTHS_RATE / usual.learning_rate
    return replace(usual, **fields)


@app.command(hidden=True)
def work(out: Annotated[Path, typer.Option()], given: Annotated[str, typer.Option()]) -> None:
    """One worker: trains until no run is left."""
    from saobp.training.dataset import data_of
    from saobp.training.pretrain import pretrain

    end_with_parent()
    tokens, left = json.loads(given)
    sys.argv = [
        "benchmarks/tiny_arena.py",
        "run",
        "--tokens",
        "tokens",
        "--out",
        "runs/tiny",
    ]  # for the records
    cells = {name_of(*cell): cell for cell in left}
    for name in claimed(out, list(cells)):
        recipe, folder = recipe_of(*cells[name]), out / "runs" / name
        texts = data_of(recipe, tokens, vocabulary=4096)
        result = pretrain(
            recipe,
            folder,
            train=texts.train,
            validation=texts.validation,
            tokenizer=texts.tokenizer,
            progress=False,
            resume=folder.exists(),
        )
        print(f"{name}: loss {result.eval_loss:.4f}", flush=True)


if __name__ == "__main__":
    app()

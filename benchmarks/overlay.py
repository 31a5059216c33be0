"""Loss curves of the same training with kernels and with the reference.

python benchmarks/overlay.py                       on a GPU: 300 steps of BERT-mini, in bfloat16
python benchmarks/overlay.py --family llama --length 256 --batch 128 --refinement high:learned  strict causal
TRITON_INTERPRET=1 python benchmarks/overlay.py --size tiny --steps 3 --batch 2        in Triton's interpreter
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt
import torch

from saobp import Refinement
from saobp.benchmarking.table import BenchmarkTable
from saobp.kernels.calls import Backend
from saobp.kernels.dispatch import select
from saobp.quickstart.pipeline import QuickstartTexts, prepare
from saobp.quickstart.prose import read_prose
from saobp.runs.machine import machine
from saobp.training.batches import BatchShard, TrainingStream
from saobp.training.objectives import objective_of
from saobp.training.pretrain import new_model
from saobp.training.recipes import PretrainRecipe, fast, tiny, with_steps

RATE = 5e-4
"""Below that of the recipes: near the edge of stability, losses depend on rounding."""


@contextmanager
def kernels(used: bool) -> Iterator[None]:
    """Force all refined attention to the kernels, or to the reference."""
    backend: Backend = "fused" if used else "reference"
    with mock.patch("saobp.functional.select", lambda call: select(call._replace(backend=backend))):
        yield


def losses(recipe: PretrainRecipe, texts: QuickstartTexts, device: torch.device, used: bool) -> list[float]:
    """Loss of each step."""
    model = new_model(recipe, texts.tokenizer).to(device).train()  # type: ignore[arg-type]
    objective = objective_of(recipe.family, texts.tokenizer, recipe.masked_share)
    shard = BatchShard(recipe, 0, 1, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=recipe.betas)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-2, total_iters=recipe.warmup_steps)
    found = []
    with kernels(used):
        for batch in islice(TrainingStream(texts.train, shard, lambda: 0), recipe.steps):
            loss = objective(model, batch["input_ids"], batch["seeds"], recipe.precision)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            warm_up.step()
            found.append(loss.item())
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="bert")
    parser.add_argument("--size", default="mini")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--refinement", default="high:0.2")
    parser.add_argument("--out", type=Path, help="folder for the Markdown, CSV and PNG files")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = tiny(given.family) if given.size == "tiny" else fast(given.family, given.size)
    recipe = replace(
        with_steps(made, given.steps),
        batch_size=given.batch,
        length=given.length,
        learning_rate=RATE,
        refinement=Refinement.of(given.refinement),
        precision="bf16" if device.type == "cuda" else "fp32",
    )
    with tempfile.TemporaryDirectory() as folder:
        texts = prepare(read_prose(), Path(folder, "text"), recipe.length, lambda *_: None)
        curves = {
            "reference": losses(recipe, texts, device, False),
            "fused": losses(recipe, texts, device, True),
            "reference, other seed": losses(replace(recipe, seed=recipe.seed + 1), texts, device, False),
        }
    table = BenchmarkTable(
        "overlay",
        f"{given.family}-{given.size}, {given.length} tokens, {given.refinement}: losses by both paths",
        machine(device.type),
    )
    table.notes.append(
        f"{given.steps} steps of {given.batch} x {recipe.length} tokens of Python's documentation, "
        f"{recipe.precision}. Difference: largest and mean distance of a curve from the reference's."
    )
    for name, curve in curves.items():
        apart = [abs(one - other) for one, other in zip(curve, curves["reference"], strict=True)]
        table.rows.append(
            {
                "path": name,
                "first loss": curve[0],
                "last loss": curve[-1],
                "largest difference": max(apart),
                "mean difference": sum(apart) / len(apart),
            }
        )
    print(table.markdown())
    if given.out is None:
        return
    table.write(given.out)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        axes.plot(range(1, len(curve) + 1), curve, style, label=name)
    axes.set(xlabel="step", ylabel="loss, nats")
    axes.legend()
    figure.savefig(given.out / "overlay.png", dpi=140)


if __name__ == "__main__":
    main()

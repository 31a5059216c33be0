"""Does ``high:learned`` help a trained decoder that goes on training? In pairs of seeds, on held-out text.

    python benchmarks/existing_decoder.py tokens --model FOLDER --data-dir FOLDER --out TOKENS
    python benchmarks/existing_decoder.py run --model FOLDER --tokens TOKENS --out FOLDER --workers 9
    python benchmarks/existing_decoder.py table --out FOLDER

Three ways to go on from the same weights, over three seeds (the order of the blocks) and two corpora: *plain*
trains the weights; *learned* trains them with strengths per head, which start at 0 and so change nothing at
first; *strengths* trains the strengths alone. Scores are mean losses in nats per token on held-out text after
the last step.

Fixed before the first run: for each corpus, learned minus plain with a 95 % paired t interval over the seeds.
It helps if the interval lies below zero, harms if above; an interval that holds zero is no gain. Strengths
alone are compared with the model as it was, which is one number: they help if the interval of that difference
lies below zero.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from saobp.runs.worker_processes import WATCH_VARIABLE, end_with_parent
from saobp.storage.json_files import write_json

METHODS = ("plain", "learned", "strengths")
CORPORA = {"wikitext2": "wikitext2_raw", "wikipedia": "wikipedia_en"}
SEEDS = (1, 2, 3)
LENGTH, BATCH, EVALUATION_BATCH = 512, 16, 32
RATE, STRENGTH_RATE, WARMUP = 1e-4, 5e-3, 0.05
HELD_OUT = 200_000
"""Tokens of held-out text, at most."""

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def tokens(
    model: Annotated[Path, typer.Option(help="Folder of the model and its tokenizer.")],
    data_dir: Annotated[Path, typer.Option(help="Folder with the corpora.")],
    out: Annotated[Path, typer.Option(help="Folder for the tokens.")],
    most: Annotated[int, typer.Option(help="Most training tokens of a corpus.")] = 50_000_000,
) -> None:
    """Tokenise training and held-out text; Wikipedia's first documents are held out."""
    from saobp.data import open_corpus, separator_of
    from saobp.training.checkpoints import load_tokenizer_of

    tokenizer = load_tokenizer_of(model)
    out.mkdir(parents=True, exist_ok=True)
    end = separator_of(tokenizer)

    def encoded(corpus: Any, limit: int) -> np.ndarray:
        parts, found, texts = [], 0, []
        for text in corpus:
            texts.append(text)
            if len(texts) == 256:
                found += _encode(tokenizer, texts, end, parts)
                texts = []
            if found >= limit:
                break
        _encode(tokenizer, texts, end, parts)
        return np.concatenate(parts).astype(np.uint16)[:limit]

    for name, folder in CORPORA.items():
        if name == "wikitext2":
            held = encoded(open_corpus(folder, data_dir, "test").documents(), HELD_OUT)
            train = encoded(open_corpus(folder, data_dir, "train").documents(), most)
        else:
            documents = iter(open_corpus(folder, data_dir).documents())
            held, train = encoded(documents, HELD_OUT), encoded(documents, most)
        np.save(out / f"{name}-held-out.npy", held)
        np.save(out / f"{name}-train.npy", train)
        print(f"{name}: {len(train):,} tokens, {len(held):,} held out")


def _encode(tokenizer: Any, texts: list[str], end: int, parts: list[np.ndarray]) -> int:
    if not texts:
        return 0
    rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    new = [np.array([*row, end]) for row in rows]
    parts += new
    return sum(map(len, new))


@app.command()
def run(
    model: Annotated[Path, typer.Option(help="Folder of the model.")],
    tokens: Annotated[Path, typer.Option(help="Folder that the command tokens has written.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    workers: Annotated[int, typer.Option(help="Processes at a time.", min=1)] = 1,
    steps: Annotated[
        int, typer.Option(help=f"Steps of {BATCH} x {LENGTH} tokens, at most one epoch.")
    ] = 6000,
    seeds: Annotated[str, typer.Option(help="Seeds joined by commas.")] = ",".join(map(str, SEEDS)),
    corpora: Annotated[str, typer.Option(help="Corpora joined by commas.")] = ",".join(CORPORA),
) -> None:
    """Train every corpus, method and seed that is not finished, then print the table."""
    claims = out / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    for claim in claims.iterdir():
        claim.unlink()
    began = time.monotonic()
    given = json.dumps([str(model), str(tokens), steps, [*map(int, seeds.split(","))], corpora.split(",")])
    line = [sys.executable, __file__, "work", "--out", str(out), "--given", given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", WATCH_VARIABLE: "1"}
    children = []
    for number in range(workers):
        with (out / f"worker-{number}.log").open("w") as log:
            children.append(
                subprocess.Popen(
                    line, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment
                )
            )
    codes = [child.wait() for child in children]
    print(f"{workers} processes, {time.monotonic() - began:.0f} s, {sum(map(bool, codes))} of them failed")
    table(out)


@app.command(hidden=True)
def work(out: Annotated[Path, typer.Option()], given: Annotated[str, typer.Option()]) -> None:
    """One worker: takes runs until none is left, all seeds of a corpus before the next."""
    end_with_parent()
    model, tokens_dir, steps, seeds, corpora = json.loads(given)
    for corpus in corpora:
        for seed in seeds:
            for method in METHODS:
                result = out / f"{corpus}-{method}-{seed}.json"
                try:
                    (out / "claims" / result.stem).touch(exist_ok=False)
                except FileExistsError:
                    continue
                if not result.exists():
                    write_json(result, go_on(model, Path(tokens_dir), corpus, method, seed, steps))
                    print(result.stem, flush=True)


def go_on(
    model_dir: str, tokens_dir: Path, corpus: str, method: str, seed: int, steps: int
) -> dict[str, Any]:
    """Train one model, and measure its loss on held-out text before and after."""
    import torch
    from transformers import AutoModelForCausalLM

    from saobp.training.checkpoints import load_model
    from saobp.training.head_records import strengths_of
    from saobp.transformers.apply import apply
    from saobp.transformers.layer_refinement import strength_parameters

    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    model = load_model(model_dir, AutoModelForCausalLM).to(device)
    held, train = (_blocks(tokens_dir / f"{corpus}-{part}.npy", device) for part in ("held-out", "train"))
    before = held_out_loss(model, held)
    if method != "plain":
        apply(model, "high:learned")
    strengths = strength_parameters(model)
    apart = {id(one) for one in strengths}
    weights = [one for one in model.parameters() if id(one) not in apart]
    if method == "strengths":
        for one in weights:
            one.requires_grad_(False)
        weights = []
    groups = [{"params": weights, "lr": RATE}, {"params": strengths, "lr": STRENGTH_RATE}]
    optimiser = torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(0.9, 0.95), weight_decay=0.0
    )
    steps = min(steps, len(train) // BATCH)
    warm = max(1, round(WARMUP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).to(device)
    losses = []
    model.train()
    for step in range(steps):
        ids = train[order[step * BATCH : (step + 1) * BATCH]]
        with torch.autocast(device, torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*weights, *strengths], 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return {
        "corpus": corpus,
        "method": method,
        "seed": seed,
        "steps": steps,
        "tokens": steps * BATCH * LENGTH,
        "before": before,
        "after": held_out_loss(model, held),
        "held_out_tokens": held.numel(),
        "losses": [round(float(loss), 4) for loss in losses[:: max(1, steps // 50)]],
        "strengths": strengths_of(model),
        "seconds": round(time.monotonic() - began, 1),
    }


def held_out_loss(model: Any, blocks: Any) -> float:
    """Mean loss in nats per predicted token."""
    import torch

    model.eval()
    total = 0.0
    with torch.no_grad(), torch.autocast(blocks.device.type, torch.bfloat16):
        for ids in blocks.split(EVALUATION_BATCH):
            total += float(model(ids, labels=ids, use_cache=False).loss) * len(ids)
    return total / len(blocks)


def _blocks(path: Path, device: str) -> Any:
    import torch

    row = np.load(path)
    count = len(row) // LENGTH
    return torch.from_numpy(row[: count * LENGTH].astype(np.int64)).view(count, LENGTH).to(device)


@app.command()
def table(out: Annotated[Path, typer.Option(help="Folder of the results.")]) -> None:
    """Print losses and paired differences, and write them to OUT/summary.json."""
    from saobp.lab.statistics import paired_gain

    found = [json.loads(path.read_text()) for path in sorted(out.glob("*-*-*.json"))]
    summary: dict[str, Any] = {"runs": found, "comparisons": {}}
    print(
        "| corpus | compared | tokens | pairs | losses | difference [95 %] | |\n|---|---|---|---|---|---|---|"
    )
    for corpus in CORPORA:
        own = [one for one in found if one["corpus"] == corpus]
        after = {
            name: {one["seed"]: one["after"] for one in own if one["method"] == name} for name in METHODS
        }
        start = {one["seed"]: one["before"] for one in own if one["method"] == "strengths"}
        pairs = {
            "learned - plain": (after["learned"], after["plain"]),
            "strengths alone - before": (after["strengths"], start),
            "plain - before": (after["plain"], start),
        }
        for name, (method, base) in pairs.items():
            gain = paired_gain(method, base, higher_is_better=False)
            if gain is None:
                continue
            means = [np.mean([side[seed] for seed in method if seed in side]) for side in (base, method)]
            between = "" if gain.low is None else f" [{gain.low:+.5f}, {gain.high:+.5f}]"
            seen = f"{own[0]['tokens']:,}"
            cells = [corpus, name, seen, str(gain.pairs), f"{means[0]:.4f} to {means[1]:.4f}"]
            print("| " + " | ".join([*cells, f"{gain.difference:+.5f}{between}", gain.verdict]) + " |")
            summary["comparisons"][f"{corpus}: {name}"] = vars(gain)
    write_json(out / "summary.json", summary)


if __name__ == "__main__":
    app()

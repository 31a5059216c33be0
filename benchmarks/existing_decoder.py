"""Does ``high:learned`` help a trained decoder that goes on training? In pairs of seeds, on held-out text.

    python benchmarks/existing_decoder.py tokens --model FOLDER --data-dir FOLDER --out TOKENS
    python benchmarks/existing_decoder.py run --model FOLDER --tokens TOKENS --out FOLDER --workers 3
    python benchmarks/existing_decoder.py table --out FOLDER

Three ways to go on from the same weights, over three seeds (the order of the blocks) and two corpora: *plain*
trains the weights; *learned* trains them with strengths per head, which start at 0 and so change nothing at
first; *strengths* trains the strengths alone. Scores are mean losses in nats per token on held-out text after
the last step.

Fixed before the first run: for each corpus, learned minus plain with a 95 % paired t interval over the seeds.
It helps if the interval lies below zero, harms if above; an interval that holds zero is no gain. Strengths
alone are compared with the model as it was, which is one number: they help if the interval of that difference
lies below zero.

How many steps fit a given time is measured by the command pace, before any loss is known. Runs of one seed
are made before those of the next, and finished ones are not repeated.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from paired_runs import claimed, compare, run_workers
from torch import Tensor
from torch.nn import functional

from saobp.runs.machine import machine
from saobp.runs.worker_processes import end_with_parent
from saobp.storage.json_files import write_json

METHODS = ("plain", "learned", "strengths")
CORPORA = {"wikitext2": "wikitext2_raw", "wikipedia": "wikipedia_en"}
SEEDS = (1, 2, 3)
LENGTH, BATCH, EVALUATION_BATCH = 512, 16, 32
RATE, STRENGTH_RATE, WARMUP = 1e-4, 5e-3, 0.05
HELD_OUT = 200_000
"""Tokens of held-out text, at most."""
OTHER_SECONDS = 15
"""What a run takes beside its steps: loading, compiling from the cache, two passes over held-out text."""

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
    compiled: Annotated[bool, typer.Option(help="Compile the layers on a GPU.")] = True,
) -> None:
    """Train every corpus, method and seed that is not finished, then print the table."""
    names = [f"{c}-{method}-{s}" for c in corpora.split(",") for s in seeds.split(",") for method in METHODS]
    names = [name for name in names if not (out / f"{name}.json").exists()]
    run_workers(__file__, out, [str(model), str(tokens), compiled, steps, names], workers)
    table(out)


@app.command()
def pace(
    model: Annotated[Path, typer.Option(help="Folder of the model.")],
    tokens: Annotated[Path, typer.Option(help="Folder that the command tokens has written.")],
    out: Annotated[Path, typer.Option(help="Folder for the measurements.")],
    seconds: Annotated[float, typer.Option(help="Time for all runs of a corpus.")],
    corpus: Annotated[str, typer.Option(help="The corpus.")] = "wikipedia",
    seeds: Annotated[int, typer.Option(help="How many seeds, one after the other.")] = len(SEEDS),
    compiled: Annotated[bool, typer.Option(help="Compile the layers on a GPU.")] = True,
) -> None:
    """Print how many steps fit, a multiple of 50: all methods are timed at once, as they will run."""
    names = [f"{corpus}-{method}-0" for method in METHODS]
    run_workers(__file__, out, [str(model), str(tokens), compiled, None, names], len(names))
    found = [json.loads((out / f"{name}.json").read_text()) for name in names]
    step = sum(one["step_seconds"] for one in found) / len(found)
    print([round(one["step_seconds"], 4) for one in found])
    print(max(50, int((seconds / seeds - OTHER_SECONDS) / step) // 50 * 50))


@app.command(hidden=True)
def work(out: Annotated[Path, typer.Option()], given: Annotated[str, typer.Option()]) -> None:
    """One worker: takes runs until none is left, all seeds of a corpus before the next."""
    end_with_parent()
    model, tokens_dir, compiled, steps, names = json.loads(given)
    for name in claimed(out, names):
        corpus, method, seed = name.split("-")
        run = Continuation(model, Path(tokens_dir), corpus, method, int(seed))
        if compiled and run.device == "cuda":
            run.compile()
        found = run.timed(out / "claims", len(names)) if steps is None else run.whole(steps)
        write_json(out / f"{name}.json", found)


class Continuation:
    """A trained model that goes on training in one of the three ways."""

    def __init__(self, model_dir: str, tokens_dir: Path, corpus: str, method: str, seed: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from saobp.training.checkpoints import load_model
        from saobp.transformers.apply import apply
        from saobp.transformers.layer_refinement import strength_parameters

        self.began = time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.facts = {"corpus": corpus, "method": method, "seed": seed, "machine": machine(self.device)}
        self.model: Any = load_model(model_dir, AutoModelForCausalLM).to(self.device)
        self.checksum = hashlib.sha256((tokens_dir / f"{corpus}-train.npy").read_bytes()).hexdigest()
        parts = ("held-out", "train")
        self.held, self.train = (_blocks(tokens_dir / f"{corpus}-{part}.npy", self.device) for part in parts)
        self.before = held_out_loss(self.model, self.held)
        if method != "plain":
            apply(self.model, "high:learned")
        strengths = strength_parameters(self.model)
        apart = {id(one) for one in strengths}
        weights = [one for one in self.model.parameters() if id(one) not in apart]
        if method == "strengths":
            for one in weights:
                one.requires_grad_(False)
            weights = []
        groups = [{"params": weights, "lr": RATE}, {"params": strengths, "lr": STRENGTH_RATE}]
        self.trained = [*weights, *strengths]
        self.optimiser = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self.device == "cuda",
        )
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        self.order, self.loss = order.to(self.device), next_token_loss

    def compile(self) -> None:
        """Compile the layers, which share one graph, and the loss with the output layer."""
        import torch

        for layer in self.model.model.layers:
            layer.compile(dynamic=False)
        self.loss = torch.compile(next_token_loss, dynamic=False)

    def step(self, number: int) -> Any:
        """One step of training; returns its loss."""
        import torch

        ids = self.train[self.order[number * BATCH : (number + 1) * BATCH]]
        with torch.autocast(self.device, torch.bfloat16):
            states = self.model.model(ids, use_cache=False).last_hidden_state
            loss = self.loss(states, self.model.lm_head.weight, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.detach()

    def whole(self, steps: int) -> dict[str, Any]:
        """Train, with a linear warm-up and decay, and measure the loss on held-out text again."""
        import torch

        from saobp.training.head_records import strengths_of

        steps = min(steps, len(self.train) // BATCH)
        warm = max(1, round(WARMUP * steps))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
        )
        losses = []
        self.model.train()
        for number in range(steps):
            losses.append(self.step(number))
            schedule.step()
        return {
            **self.facts,
            "steps": steps,
            "tokens": steps * BATCH * LENGTH,
            "before": self.before,
            "after": held_out_loss(self.model, self.held),
            "held_out_tokens": self.held.numel(),
            "losses": [round(float(loss), 4) for loss in losses[:: max(1, steps // 50)]],
            "strengths": strengths_of(self.model),
            "training_tokens_sha256": self.checksum,
            "seconds": round(time.monotonic() - self.began, 1),
        }

    def timed(self, folder: Path, processes: int, warm: int = 5, steps: int = 20) -> dict[str, float]:
        """Seconds of a step while so many processes train."""
        self.model.train()
        for number in range(warm):
            self.step(number).item()
        (folder / f"{self.facts['method']}.ready").touch()
        while len([*folder.glob("*.ready")]) < processes:
            time.sleep(0.05)
        began = time.monotonic()
        for number in range(warm, warm + steps):
            self.step(number).item()
        return {"step_seconds": (time.monotonic() - began) / steps}


def next_token_loss(states: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Mean loss in nats from last states ``[rows, length, width]`` and output weights ``[words, width]``."""
    logits = functional.linear(states[:, :-1], weight).float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def held_out_loss(model: Any, blocks: Any) -> float:
    """Mean loss in nats per predicted token."""
    import torch

    model.eval()
    total = 0.0
    eager = torch.compiler.set_stance("force_eager")  # compiling for a few batches would take longer
    with eager, torch.no_grad(), torch.autocast(blocks.device.type, torch.bfloat16):
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
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*-*-*.json"))]
    summary: dict[str, Any] = {"runs": found, "comparisons": {}}
    print("| corpus | compared | tokens | pairs | losses | | difference [95 %] | |\n" + "|---" * 8 + "|")
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
            tokens = f"{own[0]['tokens']:,}" if own else ""
            gain = compare([corpus, name, tokens], method, base, digits=5, higher_is_better=False)
            if gain is not None:
                summary["comparisons"][f"{corpus}: {name}"] = vars(gain)
    write_json(out / "summary.json", summary)


if __name__ == "__main__":
    app()

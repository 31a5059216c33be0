"""Does ``high:learned`` help a trained decoder that goes on training? In pairs of seeds, on held-out text.

    python benchmarks/existing_decoder.py tokens --model FOLDER --data-dir FOLDER --out TOKENS
    python benchmarks/existing_decoder.py pace --model FOLDER --tokens TOKENS --out FOLDER
    python benchmarks/existing_decoder.py run --model FOLDER --tokens TOKENS --out FOLDER --workers 2
    python benchmarks/existing_decoder.py table --out FOLDER

Four ways to go on from the same weights, over three seeds (the order of the blocks) and two corpora: *plain*
trains the weights; *learned* trains them with strengths per head, which start at 0 and so change nothing at
first; *strengths* trains the strengths alone; *temperatures* trains as many other numbers alone, a
temperature per head, which start at 1. Scores are mean losses in nats per token on held-out text after the
last step.

WikiText-2 is one epoch with 16 x 512 tokens a step. Wikipedia, fixed before its first run, has 64 x 512
tokens a step: 1525 steps (50 million tokens) for plain and learned, 305 (10 million) for strengths and
temperatures; fewer for all of them if the command pace shows, before any loss is known, that three seeds
would not fit the time.

Fixed before the first run: for each corpus, learned minus plain with a 95 % paired t interval over the seeds.
It helps if the interval lies below zero, harms if above; an interval that holds zero is no gain. Strengths
alone are compared with the model as it was, which is one number: they help if the interval of that difference
lies below zero. Fixed before the first run of temperatures: they are compared with the model as it was in the
same way, and strengths alone with temperatures alone, of the same seed, with as many tokens, the same rate
and schedule. Strengths do more than temperatures if the interval of strengths minus temperatures lies below
zero, less if above; if it holds zero, no difference is shown.

Runs of one seed are made before those of the next, those of weights before those of heads alone, and finished
ones are not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from decoder_training import ALONE, LENGTH, METHODS, Continuation
from paired_runs import claimed, compare, run_workers

from saobp.runs.worker_processes import end_with_parent
from saobp.storage.json_files import write_json
from saobp.training.compiled_step import free_memory

CORPORA = {"wikitext2": "wikitext2_raw", "wikipedia": "wikipedia_en"}
SEEDS = (1, 2, 3)
HELD_OUT = 200_000
"""Tokens of held-out text, at most."""
NEAR_ZERO = 0.05

Folder = Annotated[Path, typer.Option(help="Folder of the model.")]
Tokens = Annotated[Path, typer.Option(help="Folder that the command tokens has written.")]
Batch = Annotated[int, typer.Option(help=f"Blocks of {LENGTH} tokens a step.", min=1)]
ALL_METHODS = ",".join(METHODS)
Methods = Annotated[str, typer.Option(help=f"Methods joined by commas, of {ALL_METHODS}.")]
Compiled = Annotated[bool, typer.Option(help="Compile the layers on a GPU.")]

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
    model: Folder,
    tokens: Tokens,
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    workers: Annotated[int, typer.Option(help="Processes at a time.", min=1)] = 1,
    batch: Batch = 16,
    steps: Annotated[int, typer.Option(help="Steps of a run, at most one epoch.", min=1)] = 6000,
    alone_steps: Annotated[
        int | None, typer.Option(help=f"Steps of {' and '.join(ALONE)}, if others.", min=1)
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds joined by commas.")] = ",".join(map(str, SEEDS)),
    corpora: Annotated[str, typer.Option(help="Corpora joined by commas.")] = ",".join(CORPORA),
    methods: Methods = ALL_METHODS,
    compiled: Compiled = True,
) -> None:
    """Train every corpus, method and seed that is not finished, then print the table."""
    names = queue(_known(corpora, CORPORA), _known(methods, METHODS), seeds.split(","))
    names = [name for name in names if not (out / f"{name}.json").exists()]
    lengths = {
        method: alone_steps if method in ALONE and alone_steps is not None else steps for method in METHODS
    }
    run_workers(__file__, out, [str(model), str(tokens), compiled, batch, lengths, names], workers)
    table(out)


def queue(corpora: list[str], methods: list[str], seeds: list[str]) -> list[str]:
    """Names of runs in order: by corpus, weights before heads alone, by seed."""
    groups = [name for name in methods if name not in ALONE], [name for name in methods if name in ALONE]
    return [
        f"{corpus}-{method}-{seed}"
        for corpus in corpora
        for group in groups
        for seed in seeds
        for method in group
    ]


def _known(given: str, known: Mapping[str, Any]) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}")
    return names


@app.command()
def pace(
    model: Folder,
    tokens: Tokens,
    out: Annotated[Path, typer.Option(help="Folder for the measurements.")],
    batch: Batch = 16,
    corpus: Annotated[str, typer.Option(help="The corpus.")] = "wikipedia",
    methods: Methods = "plain,learned",
    compiled: Compiled = True,
) -> None:
    """Print tokens a second and peak memory of methods that train at the same time."""
    names = [f"{corpus}-{method}-0" for method in _known(methods, METHODS)]
    for name in names:
        (out / f"{name}.json").unlink(missing_ok=True)
    run_workers(__file__, out, [str(model), str(tokens), compiled, batch, None, names], len(names))
    for name in names:
        path = out / f"{name}.json"
        print(name, path.read_text().strip() if path.exists() else "failed, see the logs of workers")


@app.command(hidden=True)
def work(out: Annotated[Path, typer.Option()], given: Annotated[str, typer.Option()]) -> None:
    """One worker: takes runs until none is left."""
    end_with_parent()
    model, tokens_dir, compiled, batch, lengths, names = json.loads(given)

    def result(corpus: str, method: str, seed: str) -> dict[str, Any]:
        run = Continuation(model, Path(tokens_dir), corpus, method, int(seed), batch)
        if compiled and run.device == "cuda":
            run.compile()
        return run.timed(out / "claims", len(names)) if lengths is None else run.whole(lengths[method])

    for name in claimed(out, names):
        write_json(out / f"{name}.json", result(*name.split("-")))
        free_memory()


@app.command()
def table(out: Annotated[Path, typer.Option(help="Folder of the results.")]) -> None:
    """Print losses, paired differences and how far heads moved, and write them to OUT/summary.json."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*-*-*.json"))]
    summary: dict[str, Any] = {"runs": found, "comparisons": {}, "heads": {}}
    for corpus in CORPORA:
        _print_losses(corpus, [one for one in found if one["corpus"] == corpus])
    print("\n| corpus | compared | tokens | pairs | losses | | difference [95 %] | |\n" + "|---" * 8 + "|")
    for corpus in CORPORA:
        own = [one for one in found if one["corpus"] == corpus]
        before = {one["seed"]: one["before"] for one in own}
        after = {
            name: {one["seed"]: one["after"] for one in own if one["method"] == name} for name in METHODS
        }
        pairs = {
            "learned - plain": (("learned", "plain"), after["plain"]),
            "strengths alone - before": (("strengths",), before),
            "temperatures alone - before": (("temperatures",), before),
            "strengths alone - temperatures alone": (ALONE, after["temperatures"]),
            "plain - before": (("plain",), before),
        }
        for name, (methods, base) in pairs.items():
            lengths = {one["tokens"] for one in own if one["method"] in methods}
            if len(lengths) > 1:
                raise typer.BadParameter(f"{corpus}: runs of {name} differ in tokens, {sorted(lengths)}")
            tokens = f"{lengths.pop():,}" if lengths else ""
            gain = compare([corpus, name, tokens], after[methods[0]], base, digits=5, higher_is_better=False)
            if gain is not None:
                summary["comparisons"][f"{corpus}: {name}"] = vars(gain)
    print()
    for corpus in CORPORA:
        for method in METHODS:
            own = [one for one in found if (one["corpus"], one["method"]) == (corpus, method)]
            layers = [one.get("log_scales") or one.get("strengths") for one in own]
            if layers and all(layers):
                summary["heads"][f"{corpus}: {method}"] = moved = how_far(layers)
                print(f"{corpus}, {method}: " + ", ".join(f"{key} {value}" for key, value in moved.items()))
    write_json(out / "summary.json", summary)


def _print_losses(corpus: str, runs: list[dict[str, Any]]) -> None:
    """Held-out losses by seed and method."""
    if not runs:
        return
    after = {(one["seed"], one["method"]): f"{one['after']:.4f}" for one in runs}
    print(f"\n{corpus}, as it was: {runs[0]['before']:.4f}\n\n| seed | " + " | ".join(METHODS) + " |")
    print("|---" * (len(METHODS) + 1) + "|")
    for seed in sorted({one["seed"] for one in runs}):
        print(f"| {seed} | " + " | ".join(after.get((seed, method), "") for method in METHODS) + " |")


def how_far(runs: list[list[list[float]]]) -> dict[str, Any]:
    """How far numbers of heads, which start at 0, moved: ``runs`` are seeds of layers of heads."""
    numbers = np.array([np.concatenate(layers) for layers in runs])
    mean = numbers.mean(0)
    alike = [float(np.corrcoef(numbers[a], numbers[b])[0, 1]) for a, b in combinations(range(len(runs)), 2)]
    return {
        "heads": len(mean),
        "least": round(float(numbers.min()), 4),
        "most": round(float(numbers.max()), 4),
        "share near 0": round(float((abs(numbers) < NEAR_ZERO).mean()), 4),
        "heads above": int((mean > NEAR_ZERO).sum()),
        "heads below": int((mean < -NEAR_ZERO).sum()),
        "least correlation of seeds": round(min(alike), 3) if alike else None,
    }


if __name__ == "__main__":
    app()

"""Times of the operation in several source trees, in turns on one GPU, and errors against float64.

    python benchmarks/compare_trees.py main=../main/src new=src --lengths 128,256 --out FOLDER
    python benchmarks/compare_trees.py a=src b=src --device cpu --lengths 16 --rows 128 --rounds 2

For comparing versions of a kernel. Each tree has a process of its own, which keeps its calls, PyTorch's
attention among them, as CUDA graphs; in each round the processes time them one after the other, beginning
with another one each time. Calls are those of ``saobp bench attention``. A ratio is the median over rounds
of a time over PyTorch's in the same process and round. A process that fails or does not answer is left out,
and what it said is in FOLDER/NAME.log.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import saobp
from saobp import Refinement
from saobp.benchmarking import attention as bench
from saobp.benchmarking.table import BenchmarkTable, Cell
from saobp.runs.machine import machine
from saobp.testing.error_budget import distance, operation_of, run
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs
from saobp.timing import Call, Timing, captured, clock_of

PASSES = ("forward", "forward + backward")
CASES = ("fixed", "learned", "key bias")
KINDS = ("usual", "strong", "padded", "sink", "diagonal")
REPEATS = 10


def calls_of(length: int, direction: str, options: argparse.Namespace) -> dict[str, Call]:
    """Plain attention, a fixed strength, and learned ones with and without a row's own message."""
    cuda, causal = options.device == "cuda", options.causal
    shape = max(1, options.rows // (bench.HEADS * length)), bench.HEADS, length, bench.DIM
    states = bench.states_and_gradient(shape, torch.bfloat16 if cuda else torch.float32, options.device)
    strength = torch.full((bench.HEADS,), bench.STRENGTH, device=options.device)
    plain = partial(bench.attend_plain, bench.SDPA["cudnn"] if cuda else None, causal)
    fixed = partial(bench.attend_refined, "fused" if cuda else "reference", causal, strength)
    calls = {
        "plain": bench.one_call(plain, states, direction),
        "fixed": bench.one_call(fixed, states, direction),
    }
    for name, refinement in bench.LEARNED.items() if cuda else ():
        if not (causal and name == "key bias"):
            calls[name] = bench.learned_call(refinement, causal, states, direction)
    return calls


def prepared(options: argparse.Namespace) -> dict[str, tuple[Call, int]]:
    """Every call that works and how often it fits in a round's time, by length, pass and case."""
    clock = clock_of(options.device)
    found = {}
    for length in options.lengths:
        for direction in PASSES:
            for name, given in calls_of(length, direction, options).items():
                try:
                    replayed = options.device == "cuda" and length <= bench.REPLAYED
                    call = captured(given) if replayed else given
                    call()
                    count = int(options.seconds * 1e3 / max(clock(call, 5), 1e-4))
                    found[f"{length}|{direction}|{name}"] = call, max(1, min(2000, count))
                except Exception as error:
                    print(f"{length}, {direction}, {name}: {error}", file=sys.stderr)
    return found


def inputs_of(kind: str, length: int, device: str) -> AttentionInputs:
    """Heads with strengths of 0.05 to 4, or to 8 and below 0; padded, or collapsed onto one key."""
    strengths = (-0.7, 0.5, 2.0, 8.0) if kind == "strong" else (0.05, 0.5, 1.5, 4.0)
    batch = max(2, min(512, 2**23 // length**2))  # float64 maps of at most 1 GB
    inputs = attention_inputs(
        batch, 4, length, bench.DIM, strength=strengths, padding="left" if kind == "padded" else None,
        transposed=True, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device,
    )  # fmt: skip
    if kind == "sink":
        return collapsed_inputs(inputs, 10.0, "sink")
    return collapsed_inputs(inputs, 10.0, "diagonal") if kind == "diagonal" else inputs


def errors(options: argparse.Namespace) -> list[dict[str, Cell]]:
    """Errors of output and gradients over eager attention's, and how many repeats are equal."""
    backend: Any = "fused" if options.device == "cuda" else "reference"
    rows: list[dict[str, Cell]] = []
    for length in options.lengths:
        for factor in ("high",) if options.causal else ("high", "high-key-bias"):
            refinement = Refinement(factor, "learned")
            for kind in KINDS:
                inputs = inputs_of(kind, min(length, 1024), options.device)
                fused = operation_of(refinement, inputs, backend=backend, is_causal=options.causal)
                eager = operation_of(refinement, inputs, backend="reference", is_causal=options.causal)
                exact, usual = run(eager, inputs.to(torch.float64)), run(eager, inputs)
                found = run(fused, inputs)
                row: dict[str, Cell] = {"tokens": inputs.query.shape[2], "factor": factor, "heads": kind}
                for name, truth in exact.items():
                    row[name] = distance(found[name], truth).typical / max(
                        distance(usual[name], truth).typical, 1e-30
                    )
                same = [
                    all(torch.equal(found[name], one) for name, one in run(fused, inputs).items())
                    for _ in range(REPEATS)
                ]
                rows.append(row | {"equal repeats": f"{sum(same)} of {REPEATS}"})
    return rows


def work(options: argparse.Namespace) -> None:
    """One tree's process: answers each word on standard input with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to the log
    calls: dict[str, tuple[Call, int]] = {}
    clock = clock_of(options.device)
    for word in sys.stdin:
        answer: object
        try:
            if word.strip() == "prepare":
                calls = prepared(options)
                answer = str(Path(saobp.__file__).parent)
            elif word.strip() == "time":
                answer = {name: clock(call, count) for name, (call, count) in calls.items()}
            else:
                answer = errors(options)
        except Exception as error:
            print(f"{word.strip()}: {error}", file=sys.stderr)
            answer = None
        print(json.dumps(answer), file=answers, flush=True)


class Tree:
    """A tree's process."""

    def __init__(self, name: str, source: str, options: argparse.Namespace) -> None:
        self.name, self.patience = name, options.patience
        with (options.out / f"{name}.log").open("w") as log:
            self.process: subprocess.Popen[str] | None = subprocess.Popen(
                [sys.executable, __file__, *options.words, "--worker"],
                env=os.environ | {"PYTHONPATH": str(Path(source).resolve()), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def begin(self, word: str) -> None:
        if self.process is not None and self.process.stdin is not None:
            try:
                print(word, file=self.process.stdin, flush=True)
            except BrokenPipeError:
                self.end("ended by itself")

    def answer(self) -> Any:
        """What the process answers; None once it is gone."""
        if self.process is None or self.process.stdout is None:
            return None
        if not select.select([self.process.stdout], [], [], self.patience)[0]:
            return self.end(f"did not answer within {self.patience:g} s")
        line = self.process.stdout.readline()
        return json.loads(line) if line else self.end("ended by itself")

    def ask(self, word: str) -> Any:
        self.begin(word)
        return self.answer()

    def end(self, why: str) -> None:
        print(f"{self.name} {why}: see {self.name}.log", file=sys.stderr)
        if self.process is not None:
            self.process.kill()
        self.process = None


def table_of_times(trees: list[Tree], options: argparse.Namespace) -> BenchmarkTable:
    for tree in trees:  # they compile side by side
        tree.begin("prepare")
    for tree in trees:
        print(f"{tree.name}: {tree.answer()}", file=sys.stderr)
    found: dict[str, dict[str, list[float]]] = {tree.name: {} for tree in trees}
    for turn in range(options.rounds):
        first = turn % len(trees)
        for tree in trees[first:] + trees[:first]:
            for name, time in (tree.ask("time") or {}).items():
                found[tree.name].setdefault(name, []).append(time)
    table = BenchmarkTable("compare-trees", "Source trees in turns", machine(options.device))
    table.notes.append(
        f"Milliseconds, medians of {options.rounds} rounds; about {options.rows} rows (batch x heads x "
        f"length), {bench.HEADS} heads of {bench.DIM}{', strict causal' if options.causal else ''}. 'fixed' "
        f"is `high` with strength {bench.STRENGTH}; 'learned' and 'key bias' have learned strengths of 0.05 "
        f"to 4 and their gradients. CUDA graphs up to {bench.REPLAYED} tokens. 'plain' is cuDNN's attention "
        "on a GPU. The spread is the largest of a row's half distances of quartiles."
    )
    for length in options.lengths:
        for direction in PASSES:
            for name, times in found.items():
                table.rows.append(
                    {"tokens": length, "pass": direction, "tree": name}
                    | cells(times, f"{length}|{direction}|")
                )
    return table


def cells(times: dict[str, list[float]], prefix: str) -> dict[str, Cell]:
    """Medians by case, ratios to plain attention, and the spread."""
    timings = {
        name: Timing(tuple(times[prefix + name])) for name in ("plain", *CASES) if prefix + name in times
    }
    row: dict[str, Cell] = {name: timing.median for name, timing in timings.items()}
    if "plain" in timings:
        row |= {f"{n} / plain": t.over(timings["plain"]) for n, t in timings.items() if n != "plain"}
    return row | {"spread %": 100 * max((timing.spread for timing in timings.values()), default=0.0)}


def whole_numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main(words: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=SRC")
    parser.add_argument("--lengths", type=whole_numbers, default=[128, 256])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rows", type=int, default=bench.ROWS, help="batch x heads x length of a timed call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.015, help="of one call in one round")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds to wait for an answer")
    parser.add_argument("--no-errors", action="store_true", help="times only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("compare-trees"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = sys.argv[1:] if words is None else list(words)
    options = parser.parse_args(given)
    options.words = given
    if options.worker:
        work(options)
        return
    if wrong := [one for one in options.trees if "=" not in one or not Path(one.split("=", 1)[1]).is_dir()]:
        parser.error(f"{wrong[0]!r} is not NAME=SRC with a folder SRC")
    options.out.mkdir(parents=True, exist_ok=True)
    named = [one.split("=", 1) for one in options.trees]
    trees = [Tree(name, source, options) for name, source in named]
    times = table_of_times(trees, options)
    times.write(options.out)
    times.show(Console(width=200))
    if options.no_errors:
        return
    table = BenchmarkTable("compare-trees-errors", "Errors of source trees", machine(options.device))
    table.notes.append(
        "Root mean square error against float64 over that of eager attention in the same precision, learned "
        "strengths, up to 1024 tokens; as many heads as kernels for many heads need."
    )
    for tree in trees:
        table.rows += [{"tree": tree.name} | row for row in tree.ask("errors") or []]
        table.write(options.out)
    table.show(Console(width=200))


if __name__ == "__main__":
    main()

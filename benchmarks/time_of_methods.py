"""Time of a training step with each method, in turns on one quiet GPU.

    python benchmarks/time_of_methods.py none high:learned temperature --tokens TOKENS --out time.json

Each method is a run of ``saobp pretrain`` (compiled, captured, with its optimiser and its data) in a process
of its own. All compile side by side; then one process at a time trains a block of steps while the others
wait, round by round, so that a drift of the machine meets every method. A method whose step has gone on
uncompiled or without its graph is named, left out of the file, and makes the exit code 1. ``saobp arena``
reads the file if it lies beside its page.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from saobp.lab.step_times import LATER, SHARED
from saobp.refinement import Refinement
from saobp.runs.machine import machine
from saobp.storage.json_files import write_json
from saobp.training.dataset import data_of
from saobp.training.graphed_step import WARMUP_STEPS
from saobp.training.pretrain import pretrain
from saobp.training.recipes import PretrainRecipe, named_recipe, parse_override

FIRST = 70
"""Step after which the first block begins: compiled, captured and warm."""
NOTE = "note: "
"""Begins what a process says in place of its times."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--corpus", default="wikipedia_en,gutenberg_books,imdb_reviews")
    parser.add_argument("--vocabulary", type=int, help="train a tokenizer of so many tokens")
    parser.add_argument("--family", default="modernbert")
    parser.add_argument("--size", default="mini")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--set", action="append", default=[], help="a field of the recipe: optimizer=muon")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    parser.add_argument("--patience", type=float, default=600, help="seconds for compilation")
    parser.add_argument("--first", type=int, default=FIRST)
    parser.add_argument("--out", type=Path, default=Path("time.json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        train(given)
    else:
        try:
            check(given)
        except ValueError as problem:
            parser.error(str(problem))
        measure(given)


def check(given: argparse.Namespace) -> None:
    """Raise a ValueError before anything is compiled, if a method or the file to write is not possible."""
    for method in given.methods:
        recipe_of(given, method)
    if not given.out.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {given.out.parent} to write {given.out.name} to")


def measure(given: argparse.Namespace) -> None:
    """Start a process for each method and let them train in turns; writes after each round."""
    options = [word for word in sys.argv[1:] if word not in given.methods]
    children = {
        method: subprocess.Popen(
            [sys.executable, __file__, method, *options, "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for method in given.methods
    }
    seconds: dict[str, list[float]] = {method: [] for method in given.methods}
    left_out: dict[str, str] = {}

    def leave_out(method: str, reason: object) -> None:
        children[method].kill()  # what still compiles would disturb the others
        del seconds[method]
        left_out[method] = str(reason)
        print(f"{method} is left out: {reason}", flush=True)

    try:
        ends = time.monotonic() + given.patience
        for method, child in children.items():
            try:
                wait_until_ready(child, ends)
            except LeftOutError as reason:
                leave_out(method, reason)
        print("ready:", *seconds, flush=True)
        for number in range(given.rounds):
            for method in list(seconds):
                try:
                    seconds[method].append(block(children[method]))
                except LeftOutError as reason:
                    leave_out(method, reason)
            if number or seconds:
                write(given, seconds)
            if not seconds:
                sys.exit("no method is left: the reasons are above")
            print(f"round {number + 1}", {m: f"{1e3 * s[-1]:.3f} ms" for m, s in seconds.items()}, flush=True)
    finally:
        for child in children.values():
            child.kill()
    if left_out:
        sys.exit(f"{given.out} lacks {', '.join(left_out)}: the reasons are above")


class LeftOutError(Exception):
    """A method has no times, or none that count, with the reason."""


def wait_until_ready(child: subprocess.Popen[str], ends: float) -> None:
    """Wait until a process has compiled, but not longer than until then (of ``time.monotonic``)."""
    found, _, _ = select.select([child.stdout], [], [], max(0.0, ends - time.monotonic()))
    if not found:
        raise LeftOutError("it has not compiled in time, see --patience")
    answer(child)


def block(child: subprocess.Popen[str]) -> float:
    """Let a process train a block: mean seconds of its steps."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write("go\n")
        child.stdin.flush()
    seconds = answer(child)
    answer(child)  # ready for the next block, or done
    return float(seconds)


def answer(child: subprocess.Popen[str]) -> str:
    """The next line of a process."""
    assert child.stdout is not None
    line = child.stdout.readline().strip()
    if not line:
        raise LeftOutError("its process has ended, the error is above")
    if line.startswith(NOTE):
        raise LeftOutError(line.removeprefix(NOTE))
    return line


def write(given: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    """``seconds``: mean seconds of a step by method and round."""
    recipe = recipe_of(given, given.methods[0])
    found = {
        "command": " ".join(["python", "benchmarks/time_of_methods.py", *sys.argv[1:]]),
        "environment": machine("cuda" if torch.cuda.is_available() else "cpu"),
        **{name: getattr(recipe, name) for name in (*SHARED, *LATER)},
        "steps": given.steps,
        "seconds": seconds,
    }
    write_json(given.out, found)


def recipe_of(given: argparse.Namespace, method: str) -> PretrainRecipe:
    recipe = named_recipe("modern", given.family, given.size)
    last = blocks(given.first, given.steps, given.rounds)[-1][1]
    return replace(
        recipe,
        steps=last + 1,
        warmup_steps=last,  # at the full rate from the start, checks of the captured step raise false alarms
        **dict.fromkeys(("log_steps", "evaluation_steps", "checkpoint_steps"), last + 1),
        batch_size=given.rows,
        refinement=None if method == "none" else Refinement.of(method),
        corpus=given.corpus,
        health_texts=0,
        **dict(map(parse_override, given.set)),
        **({} if torch.cuda.is_available() else {"precision": "fp32", "compiled": False}),
    )


def blocks(first: int, steps: int, count: int) -> list[tuple[int, int]]:
    """``count`` blocks of steps (begin, end) in which the captured step is not checked.

    At replays 1, 2, 4, 8 and so on training compares it with an uncompiled step, which takes time of its own.
    """
    found: list[tuple[int, int]] = []
    begin = first
    while len(found) < count:
        checks = [2**n + WARMUP_STEPS for n in range(20)]
        inside = [step for step in checks if begin < step <= begin + steps]
        if inside:
            begin = inside[-1] + 2
        else:
            found.append((begin, begin + steps))
            begin += steps
    return found


class Turns(TrainerCallback):
    """Waits for a line on stdin before each block, and ``say``s the mean seconds of its steps after it.

    A note of training that the step has lost its graph or its compiler is said instead, and ends the process.
    """

    def __init__(self, planned: Sequence[tuple[int, int]], say: Callable[[object], None]) -> None:
        self.begins, self.ends = ([block[end] for block in planned] for end in (0, 1))
        self.say, self.began, self.steps = say, 0.0, planned[0][1] - planned[0][0]

    def notify(self, words: str) -> None:
        if "cannot be compared" not in words:  # where the captured step stays in use
            self.say(f"{NOTE}{words}")
            sys.exit(1)
        print(words, file=sys.stderr, flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step in self.ends:
            settle()
            self.say((time.perf_counter() - self.began) / self.steps)
        if state.global_step in self.begins:
            settle()
            self.say("ready")
            if not sys.stdin.readline():
                sys.exit("the process that gives turns is gone")
            self.began = time.perf_counter()
        elif state.global_step == self.ends[-1]:
            self.say("done")


def settle() -> None:
    """Wait until the GPU has done what was launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(given: argparse.Namespace) -> None:
    """A run that trains when it is its turn."""
    (method,) = given.methods
    recipe = recipe_of(given, method)
    texts = data_of(recipe, given.tokens, vocabulary=given.vocabulary)
    planned = blocks(given.first, given.steps, given.rounds)

    lines = sys.stdout

    def say(word: object) -> None:
        print(word, file=lines, flush=True)

    turns = Turns(planned, say)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        pretrain(
            recipe,
            Path(folder) / "run",
            train=texts.train,
            validation=None,
            tokenizer=texts.tokenizer,
            progress=False,
            callbacks=[turns],
            notify=turns.notify,
        )


if __name__ == "__main__":
    main()

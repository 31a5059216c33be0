"""Makes the runs of results/arena/plan.md on one GPU: choice, confirmation, then what else there is time for.

    python benchmarks/arena_runs.py --tokens TOKENS --out runs/arena --jobs 10 --seconds 1500

Each of the processes claims one run after another. When the runs of the choice are done, the rule of
``arena_plan.py`` chooses, ``chosen.json`` says what and why, and the processes go on with the confirmation.
``--candidates`` limits the choice to the first forms; ``--choose-within`` ends it early: forms that lack a
seed by then are left out of it. A second call continues. Then ``saobp arena runs/arena/runs --fresh
6,7,8,9,10`` writes the page.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from arena_plan import CANDIDATES, Form, Run, choice_runs, choose, confirming_runs, further_runs, losses_of
from filelock import BaseFileLock

from saobp.lab.arena_records import method_of, recorded
from saobp.runs.layout import RESULT
from saobp.storage.json_files import append_line, read_json, write_json
from saobp.storage.locks import try_lock

RECORDS = Path(__file__).parents[1] / "results" / "arena" / "runs.json"
SLOWER = ("key-bias", "message-gate", "by-distance", "later-steps", "sinkhorn", "softmax-plus-one")
"""Words in the names of methods for whose runs a quarter more time is reserved."""
LOCK = "lock"
LEAST_SHARE = 0.4
"""A run that has the GPU for itself takes at least this share of a typical run's time."""
DECODERS_AT_ONCE = 3
"""Runs of a decoder that fit on the GPU side by side: 25 GB of its memory each."""


class Queue:
    """Runs of the plan, which several processes share.

    Run folders are in ``out/runs`` (controls in ``out/again``). A process that creates ``out/claims/NAME``
    makes that run, and holds a lock in it while it lives.
    ends, choose_until: seconds since 1970
    typical: seconds of a run beside ``jobs - 1`` others, with which it shares the GPU
    candidates: forms of the choice of which runs are made
    """

    def __init__(
        self,
        out: Path,
        ends: float,
        choose_until: float,
        typical: float = 150.0,
        *,
        jobs: int = 1,
        candidates: int = len(CANDIDATES),
    ) -> None:
        self.out, self.ends, self.choose_until, self.typical = out, ends, choose_until, typical
        self.jobs, self.candidates = jobs, candidates
        self.before = losses_of(read_json(RECORDS))
        self.held: dict[str, BaseFileLock] = {}

    def folder(self, run: Run) -> Path:
        return self.out / ("again" if run.control else "runs") / run.name

    def claim_of(self, run: Run) -> Path:
        return self.out / "claims" / run.name

    def is_done(self, run: Run) -> bool:
        return (self.folder(run) / RESULT).exists() or (self.claim_of(run) / "failed").exists()

    def is_running(self, run: Run) -> bool:
        return self.claim_of(run).exists() and not self.is_done(run) and not self.is_dead(run)

    def is_dead(self, run: Run) -> bool:
        """Whether the process that claimed a run is gone and has left it unfinished."""
        if not self.claim_of(run).exists() or self.is_done(run):
            return False
        lock = try_lock(self.claim_of(run) / LOCK)
        if lock is not None:
            lock.release()
        return lock is not None

    def clear_unfinished(self) -> None:
        """Let runs that a killed process had claimed be claimed again."""
        for run in self.planned(everything=True):
            if self.is_dead(run):
                shutil.rmtree(self.folder(run), ignore_errors=True)
                shutil.rmtree(self.claim_of(run))

    def chosen(self) -> Form | None:
        """The chosen form, None while runs of the choice are running or may still be started."""
        path = self.out / "chosen.json"
        if path.exists():
            return Form(**read_json(path)["chosen"])
        choice = list(choice_runs(self.before, self.candidates))
        open_ones = [run for run in choice if not self.is_done(run) and not run.control]
        if any(self.is_running(run) for run in open_ones) or (open_ones and time.time() < self.choose_until):
            return None
        found = losses_of(recorded([self.out / "runs"]).values()) if (self.out / "runs").exists() else {}
        losses = {m: {**self.before.get(m, {}), **found.get(m, {})} for m in {**self.before, **found}}
        form, means, left_out = choose(losses)
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_json(path, {"chosen": asdict(form), "means": means, "left_out": left_out, "time": when})
        return form

    def planned(self, *, everything: bool = False) -> Iterator[Run]:
        """Runs in order that are not recorded; of the choice only while it is open, unless ``everything``."""
        chosen = self.chosen()
        if everything or (chosen is None and time.time() < self.choose_until):
            yield from choice_runs(self.before, self.candidates)
        yield from (
            run for run in chain(confirming_runs(chosen), further_runs()) if not self.is_recorded(run)
        )

    def is_recorded(self, run: Run) -> bool:
        """Whether ``results/arena/runs.json`` has an encoder's run."""
        return run.family == "modernbert" and run.seed in self.before.get(method_of(run.recipe.to_dict()), {})

    def claim(self) -> Run | None:
        """The next run that nobody has and that will be done in time."""
        running = [run for run in self.planned(everything=True) if self.is_running(run)]
        decoders = sum(run.family == "llama" for run in running)
        seconds = self.least_seconds(len(running))
        for run in self.planned():
            slow = any(word in run.form.refinement for word in SLOWER)
            late = time.time() + seconds * (1.25 if slow else 1.0) > self.ends
            full = run.family == "llama" and decoders >= DECODERS_AT_ONCE
            if late or full or self.claim_of(run).exists():
                continue
            with contextlib.suppress(FileExistsError):
                self.claim_of(run).mkdir(parents=True)
                while (lock := try_lock(self.claim_of(run) / LOCK)) is None:
                    time.sleep(0.01)  # another process looks whether this one lives
                self.held[run.name] = lock
                return run
        return None

    def is_empty(self) -> bool:
        return self.chosen() is not None and all(self.claim_of(run).exists() for run in self.planned())

    def least_seconds(self, running: int = 0) -> float:
        """Seconds of one more run if no other follows: faster than typical where fewer share the GPU."""
        return self.typical * max(LEAST_SHARE, (1 + running) / self.jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/arena"))
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for all of it")
    parser.add_argument("--choose-within", type=float, default=0.0, help="seconds for the choice (no limit)")
    parser.add_argument(
        "--candidates", type=int, default=len(CANDIDATES), help="so many forms to choose from"
    )
    parser.add_argument("--typical", type=float, default=150.0, help="seconds of a run, until one is done")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        ends, until = (float(os.environ[name]) for name in ("ARENA_ENDS", "ARENA_CHOOSE_UNTIL"))
        queue = Queue(given.out, ends, until, given.typical, jobs=given.jobs, candidates=given.candidates)
        work(queue, given.tokens)
        return
    ends = time.time() + given.seconds
    until = time.time() + given.choose_within if given.choose_within else ends
    for name in ("runs", "again", "claims"):
        (given.out / name).mkdir(parents=True, exist_ok=True)
    Queue(given.out, ends, until, candidates=given.candidates).clear_unfinished()
    environment = {"ARENA_ENDS": str(ends), "ARENA_CHOOSE_UNTIL": str(until), "SAOBP_JOBS": str(given.jobs)}
    with contextlib.ExitStack() as stack:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--worker"],
                env={"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", **os.environ, **environment},
                stdout=stack.enter_context((given.out / f"worker-{number}.log").open("a")),
                stderr=subprocess.STDOUT,
            )
            for number in range(given.jobs)
        ]
        sys.exit(max(worker.wait() for worker in workers))


def work(queue: Queue, tokens: str) -> None:
    """Train one claimed run after another in this process."""
    import gc

    import torch

    while time.time() + queue.least_seconds() < queue.ends:
        run = queue.claim()
        if run is None:
            if queue.is_empty():
                break
            time.sleep(1)  # where others end, the GPU has room for a run that would have been too late
            continue
        began = time.time()
        try:
            loss = train(run, queue, tokens)
            queue.typical = time.time() - began
            say(f"done {run.name} {loss:.4f}, {queue.typical:.0f} s")
        except Exception as problem:
            traceback.print_exc()
            (queue.claim_of(run) / "failed").write_text(repr(problem)[:500])
            say(f"failed {run.name}")
            if torch.cuda.is_available():  # an error of CUDA stays with its process
                os.execv(sys.executable, [sys.executable, *sys.argv])
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    say("no run left that fits")


def train(run: Run, queue: Queue, tokens: str) -> float:
    """Make a run and return its held-out loss."""
    from transformers import TrainerCallback

    from saobp.training.dataset import find_pretraining_data
    from saobp.training.pretrain import pretrain
    from saobp.transformers.layer_refinement import PER_HEAD, attached

    numbers = queue.claim_of(run) / "numbers.jsonl"

    class Numbers(TrainerCallback):
        """Writes strengths, temperatures and the like every 50 steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
            if state.global_step % 50 == 0:
                own = [
                    (f"{layer}.{name}", parameter.detach().float().tolist())
                    for layer, (_, module) in enumerate(attached(model))
                    for name, parameter in module.named_parameters()
                    if name.endswith(PER_HEAD)
                ]
                if own:
                    append_line(numbers, {"step": state.global_step, **dict(own)})

    recipe = run.recipe
    texts = find_pretraining_data(
        recipe.family, recipe.corpus, length=recipe.length, seed=recipe.seed, tokens=tokens
    )
    before, sys.argv = sys.argv, run.command  # what the record keeps
    try:
        result = pretrain(
            recipe,
            queue.folder(run),
            train=texts.train,
            validation=texts.validation,
            tokenizer=texts.tokenizer,
            progress=False,
            callbacks=[Numbers()],
            notify=say,
        )
    finally:
        sys.argv = before
    if numbers.exists():
        shutil.move(numbers, queue.folder(run) / numbers.name)
    assert result.eval_loss is not None
    return result.eval_loss


def say(words: str) -> None:
    print(time.strftime("%H:%M:%S"), words, flush=True)


if __name__ == "__main__":
    main()

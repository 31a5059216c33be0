"""Makes the runs of round seven of results/arena/plan.md on one GPU.

    python benchmarks/arena_runs.py --tokens TOKENS --out runs/arena --jobs 12 --seconds 1200
    python benchmarks/arena_runs.py --out runs/arena --pack records.tar.xz

Each of the processes claims one run after another, in the order of ``arena_plan.py``. ``log.txt`` gets a line
for each run. A setting is chosen by the rules there once all runs of its tuning have ended; processes that
have nothing to make wait for it. A second call continues after a kill, and a run that an error of CUDA has
ended goes on from its last checkpoint, since another process on the GPU may have caused it; it has failed
when that happens for the third time at the same step. A full disk, or a folder in which a run cannot go on,
stops a process and counts against no run. TOKENS holds the stores of BERT's tokens. ``--pack`` puts all
records, without models, into one file, also while runs are made.
On another machine or day ``--made results/arena/runs.json`` counts the runs recorded there as made, as does a
pack unpacked in an empty OUT. Runs at equal time are made only with ``--times FILE``, which
``time_of_methods.py`` has written on this GPU at the chosen setting.
``saobp arena`` writes the page, with the options that the plan names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from arena_pack import FAILED, pack
from arena_plan import (
    AT_EQUAL_TIME,
    Losses,
    Run,
    chosen_form,
    chosen_rate,
    chosen_setting,
    chosen_weights,
    fits,
    form_runs,
    is_tuned,
    penalty_runs,
    planned_runs,
    rate_runs,
    setting_runs,
    tuning_runs,
)
from filelock import BaseFileLock

from saobp.lab.arena_records import saved_records
from saobp.lab.step_times import StepTimes
from saobp.runs.folder import RunError, RunFolder
from saobp.runs.layout import RESULT
from saobp.runs.worker_processes import JOBS_VARIABLE, WATCH_VARIABLE, end_with_parent
from saobp.storage.atomic import write_atomically
from saobp.storage.json_files import append_line, keep_lines_up_to, read_lines, read_object
from saobp.storage.locks import exclusive, try_lock

LOCK = "lock"
LEAST_SHARE = 0.4
"""A run that has the GPU for itself takes at least this share of a typical run's time."""
LOST = "lost"
"""In a claim: the steps at which an error of CUDA has ended the run."""
MOST_LOSSES = 2
"""So often a run may be lost at one step: errors that others cause meet it at different ones."""
OF_CUDA = ("CUDA", "cuDNN")
"""In messages of PyTorch and Triton: errors of the GPU and of its memory, which others share."""
NO_ROOM = "No space left on device"
"""In messages of a compiler whose cache is on a full disk."""


class Queue:
    """Runs of the plan, which several processes share.

    Run folders are in ``out/runs``. A process that holds the lock in ``out/claims/NAME`` makes that run; if
    it dies, another one continues.
    ends: seconds since 1970
    typical: seconds of a run beside ``jobs - 1`` others, with which it shares the GPU
    made: held-out losses of runs made elsewhere, by name
    times: of steps, for runs at equal time
    """

    def __init__(
        self,
        out: Path,
        ends: float,
        typical: float = 150.0,
        *,
        jobs: int = 1,
        made: Mapping[str, float | None] = MappingProxyType({}),
        times: StepTimes | None = None,
    ) -> None:
        self.out, self.ends, self.typical, self.jobs, self.made = out, ends, typical, jobs, made
        self.times = times
        self.held: dict[str, BaseFileLock] = {}
        self.reached = 0
        """The last step of the run that this process makes."""

    def planned(self) -> list[Run]:
        """All runs in order; those at a chosen setting only once it is chosen."""
        return list(planned_runs(self.tuned(), self.times))

    def tuned(self) -> Losses:
        """What has ended of the runs on which choices depend."""
        return {run: self.loss(run) for run in tuning_runs() if self.is_done(run)}

    def loss(self, run: Run) -> float | None:
        """The held-out loss of a run, None if it failed."""
        path = self.folder(run) / RESULT
        return read_object(path)["eval_loss"] if path.exists() else self.made.get(run.name)

    def folder(self, run: Run) -> Path:
        return self.out / "runs" / run.name

    def claim_of(self, run: Run) -> Path:
        return self.out / "claims" / run.name

    def is_done(self, run: Run) -> bool:
        ended = (self.folder(run) / RESULT, self.claim_of(run) / FAILED)
        return run.name in self.made or any(path.exists() for path in ended)

    def end(self, run: Run, problem: Exception, *, by_cuda: bool) -> str:
        """Write down that an error has ended a run; tells whether it is lost or has failed."""
        lost, words = self.claim_of(run) / LOST, repr(problem)[:500]
        before = [one["step"] for one in read_lines(lost)]
        if by_cuda and before.count(self.reached) < MOST_LOSSES:
            append_line(lost, {"step": self.reached, "problem": words})
            return LOST
        write_atomically(self.claim_of(run) / FAILED, words)
        return FAILED

    def is_running(self, run: Run) -> bool:
        """Whether a living process makes the run."""
        if not self.claim_of(run).exists() or self.is_done(run):
            return False
        lock = try_lock(self.claim_of(run) / LOCK)
        if lock is not None:
            lock.release()
        return lock is None

    def claim(self) -> Run | None:
        """The next run that nobody has and that will be done in time."""
        with exclusive(self.out / "claims"):  # to see whether a run is made, others lock it for a moment
            planned = self.planned()
            running = sum(self.is_running(run) for run in planned)
            if time.time() + self.least_seconds(running) > self.ends:
                return None
            for run in planned:
                if self.is_done(run):
                    continue
                self.claim_of(run).mkdir(parents=True, exist_ok=True)
                lock = try_lock(self.claim_of(run) / LOCK)
                if lock is not None and not self.is_done(run):  # nobody has ended it meanwhile
                    self.held[run.name] = lock
                    return run
            return None

    def is_empty(self) -> bool:
        """Whether nothing is left to start."""
        with exclusive(self.out / "claims"):
            return is_tuned(self.tuned()) and all(
                self.is_done(run) or self.is_running(run) for run in self.planned()
            )

    def least_seconds(self, running: int = 0) -> float:
        """Seconds of one more run if no other follows: faster than typical where fewer share the GPU."""
        return self.typical * max(LEAST_SHARE, (1 + running) / self.jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", help="folder of token stores")
    parser.add_argument("--out", type=Path, default=Path("runs/arena"))
    parser.add_argument("--made", type=Path, help="records of runs made elsewhere: results/arena/runs.json")
    parser.add_argument("--times", type=Path, help="times of steps, for runs at equal time")
    parser.add_argument("--pack", type=Path, help="only put all records into this .tar.xz")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for all of it")
    parser.add_argument("--typical", type=float, default=150.0, help="seconds of a run, until one is done")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        end_with_parent()
    ends = float(os.environ.get("ARENA_ENDS", time.time() + given.seconds))
    try:
        if given.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, not {given.jobs}")
        if given.pack is not None:
            pack(given.out, given.pack)
            return
        if given.tokens is None:
            raise ValueError("name the folder of token stores by --tokens")
        made = {} if given.made is None else recorded_losses(given.made)
        times = None if given.times is None else StepTimes.read(given.times)
        queue = Queue(given.out, ends, given.typical, jobs=given.jobs, made=made, times=times)
        if not given.worker:
            check(queue, given.tokens, given.made)
    except (ValueError, OSError) as problem:
        parser.error(str(problem))
    if given.worker:
        work(queue, given.tokens)
        return
    for name in ("runs", "claims"):
        (given.out / name).mkdir(parents=True, exist_ok=True)
    environment = {"ARENA_ENDS": str(ends), JOBS_VARIABLE: str(given.jobs), WATCH_VARIABLE: "1"}
    with contextlib.ExitStack() as stack:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--worker"],
                env={"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", **os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=stack.enter_context((given.out / f"worker-{number}.log").open("a")),
                stderr=subprocess.STDOUT,
            )
            for number in range(given.jobs)
        ]
        codes = [worker.wait() for worker in workers]  # below zero where a signal ended one
    failed = [f"worker-{number}.log" for number, code in enumerate(codes) if code]
    sys.exit(f"ended early, see {given.out / 'log.txt'} and {', '.join(failed)}" if failed else 0)


def check(queue: Queue, tokens: str, made: Path | None) -> None:
    """Raise a ValueError before anything is started if no run could be made here, or none compared.

    Losses by which a setting is chosen must be of the texts that are trained on here.
    """
    from saobp.training.dataset import data_of

    runs = list(setting_runs())
    recipe = runs[0].recipe
    if not has_gpu(recipe.compiled):
        raise ValueError("torch sees no GPU, without which a run takes days")
    texts = data_of(recipe, tokens)
    data = {name: store.checksum for name, store in texts.train.stores.items()}
    records = {} if made is None else saved_records(made)
    for run in runs:
        record = records.get(run.name) or RunFolder(queue.folder(run)).record
        if record and record.get("data") != data:
            raise ValueError(f"{run.name} was trained on other texts than those in {tokens}: its data differ")
    if queue.times is not None:
        check_times(queue.times, chosen_setting(queue.tuned()))


def check_times(times: StepTimes, setting: str | None) -> None:
    """Raise a ValueError if times lack a form, or are not of the setting, where one is chosen."""
    missing = [form for form in AT_EQUAL_TIME if not times.seconds.get(form)]
    if missing:
        raise ValueError(f"{times.file} has no times of {', '.join(missing)}: measure them too")
    if setting is not None and not fits(times, setting):
        raise ValueError(
            f"{times.file} has times of another recipe than the chosen setting, {setting}: measure them "
            "again, by time_of_methods.py with the --rows and --set of that setting"
        )


def has_gpu(is_needed: bool) -> bool:
    """Whether there is a GPU; true without one if none is needed."""
    import torch

    return not is_needed or torch.cuda.is_available()


def recorded_losses(file: Path) -> dict[str, float | None]:
    """Held-out losses of the finished runs in a list of records, by name."""
    records = saved_records(file)
    return {
        name: one["result"].get("eval_loss")
        for name, one in records.items()
        if one.get("status") == "finished"
    }


def work(queue: Queue, tokens: str) -> None:
    """Train one claimed run after another in this process."""
    from saobp.training.compiled_step import free_memory

    if not has_gpu(next(setting_runs()).recipe.compiled):
        sys.exit("torch sees the GPU no longer")  # else all runs would fail, one after the other
    while time.time() + queue.least_seconds() < queue.ends:
        run = queue.claim()
        if run is None:
            if queue.is_empty():
                break
            time.sleep(1)  # where others end, the GPU has room for a run that would have been too late
            continue
        began, by_cuda = time.time(), False
        try:
            loss = train(run, queue, tokens)
            queue.typical = time.time() - began
            note(queue.out, f"done {run.name}, loss {loss:.4f}, {queue.typical:.0f} s")
        except Exception as problem:
            traceback.print_exc()
            if isinstance(problem, OSError | RunError) or NO_ROOM in str(problem):
                note(queue.out, f"stopped at {run.name}: {problem!r}"[:300])
                sys.exit("mend that, then call again: the run goes on")  # it would be the next run's end too
            by_cuda = isinstance(problem, RuntimeError) and any(word in str(problem) for word in OF_CUDA)
            outcome = queue.end(run, problem, by_cuda=by_cuda)
            note(queue.out, f"{outcome} {run.name} after step {queue.reached}: {problem!r}"[:300])
        note_choice(queue, run)
        if by_cuda:  # which stays with the process, and with it the lock
            watched = {**os.environ, WATCH_VARIABLE: "1"}
            os.execve(sys.executable, [sys.executable, *sys.argv], watched)
        free_memory()
    say("no run left that fits")


def train(run: Run, queue: Queue, tokens: str) -> float:
    """Make a run, or continue it, and return its held-out loss."""
    from transformers import TrainerCallback

    from saobp.training.dataset import data_of
    from saobp.training.pretrain import pretrain
    from saobp.transformers.layer_refinement import named_strengths

    numbers = queue.folder(run) / "numbers.jsonl"
    queue.reached = 0

    class Numbers(TrainerCallback):
        """Writes strengths, temperatures and the like every 50 steps, and how far the run is."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            queue.reached = state.global_step
            keep_lines_up_to(numbers, state.global_step)  # a continued run makes later steps again

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
            queue.reached = state.global_step
            if state.global_step % 50 == 0:
                own = {name: one.detach().float().tolist() for name, one in named_strengths(model).items()}
                if own:
                    append_line(numbers, {"step": state.global_step, **own})

    recipe = run.recipe
    texts = data_of(recipe, tokens)
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
            resume=queue.folder(run).exists(),
        )
    finally:
        sys.argv = before
    assert result.eval_loss is not None
    return result.eval_loss


def note_choice(queue: Queue, run: Run) -> None:
    """A line in the log if this run was the last one on which a choice waited."""
    losses = queue.tuned()
    setting = chosen_setting(losses)
    if setting is None:
        return
    if run in setting_runs():
        note(queue.out, f"chosen setting: {setting}")
        if queue.times is not None and not fits(queue.times, setting):
            note(queue.out, f"{queue.times.file} is of another recipe: runs at equal time wait for its times")
    rate, weights, form = (choice(setting, losses) for choice in (chosen_rate, chosen_weights, chosen_form))
    if rate is not None and run in rate_runs(setting):
        note(queue.out, f"chosen rate of small: {rate:g}")
    if weights and run in penalty_runs(setting):
        note(queue.out, f"chosen penalties: {'; '.join(weights)}")
    if run in form_runs(setting) and all(one in losses for one in form_runs(setting)):
        note(
            queue.out, f"chosen form: {'as usual' if form is None else f'{form.form} {form.trained}'.strip()}"
        )


def note(out: Path, words: str) -> None:
    """A line in the log of all processes."""
    say(words)
    with (out / "log.txt").open("a") as file:
        file.write(f"{time.strftime('%H:%M:%S')} {words}\n")


def say(words: str) -> None:
    print(time.strftime("%H:%M:%S"), words, flush=True)


if __name__ == "__main__":
    main()

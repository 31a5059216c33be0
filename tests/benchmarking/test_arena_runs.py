"""The runs of the arena's plan, in an order that survives kills."""

from __future__ import annotations

import json
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from planned_runs import FORMS, LATER, MUON_TIMES, RECORDS, finish, plan, runs
from transformers.trainer_callback import CallbackHandler
from typer.testing import CliRunner

from saobp.cli import app
from saobp.runs.folder import RunError
from saobp.testing.scripts import ROOT


def test_processes_share_the_runs_and_those_of_the_choice_follow_it(tmp_path: Path) -> None:
    queue, other = (runs.Queue(tmp_path, LATER) for _ in range(2))
    tuning = [(queue, other)[number % 2].claim() for number in range(15)]
    assert tuning == list(plan.setting_runs())
    assert other.claim() is None  # all that is left waits for the choice
    assert not other.is_empty()
    for run in tuning:
        finish(queue, run, 3.0 if run.setting == "muon-falling" else 3.1)
    assert other.claim() == plan.Run("none", 51, "muon-falling")
    tuned = set(plan.tuning_runs())
    while (run := queue.claim()) is not None:
        if run.size == "small" and run.rate == 2e-3:
            finish(queue, run, 3.0)
        elif run.size == "small" or run in tuned:
            finish(queue, run, 3.1)
    assert plan.Run("none", 35, "muon-falling", "small", 2e-3).name in queue.held
    assert plan.Run("none", 55, "muon-falling", penalty="eigen,weight=0.001").name in queue.held
    assert queue.is_empty()


def test_nothing_is_left_if_every_setting_fails(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER)
    for run in iter(queue.claim, None):
        (queue.claim_of(run) / runs.FAILED).touch()
    assert queue.is_empty()


def test_a_second_call_goes_on_where_a_killed_one_was(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER)
    first, second = (queue.claim() for _ in range(2))
    finish(queue, first, 3.1)
    queue.folder(second).mkdir(parents=True)
    again = runs.Queue(tmp_path, LATER)
    assert again.is_running(second)
    queue.held.clear()  # killed while it ran
    assert not again.is_running(second)
    assert again.claim() == second


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: an illegal memory access was encountered",
        "Triton Error [CUDA]: unspecified launch failure",
        "CUDA driver error: unspecified launch failure",
        "CUDA out of memory. Tried to allocate 20.00 MiB.",
    ],
)
def test_a_run_that_an_error_of_cuda_has_ended_goes_on_from_its_checkpoint(
    words: str, miniature: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, out = miniature
    first = next(plan.setting_runs())
    whole = runs.train(first, runs.Queue(out.with_name("whole"), LATER), str(tokens))
    step = CallbackHandler.on_step_end

    def fault(self: Any, args: Any, state: Any, control: Any) -> Any:
        if state.global_step == 3:
            raise RuntimeError(words)
        return step(self, args, state, control)

    def new_process(*_: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(runs.os, "execve", new_process)
        patched.setattr(CallbackHandler, "on_step_end", fault)
        ended = runs.Queue(out, LATER)
        with pytest.raises(InterruptedError):
            runs.work(ended, str(tokens))
        ended.held.clear()
    (line,) = (out / "log.txt").read_text().splitlines()
    assert f" lost {first.name} after step 2: RuntimeError(" in line
    queue = runs.Queue(out, LATER)
    assert queue.claim() == first
    numbers = queue.folder(first) / "numbers.jsonl"
    numbers.write_text('{"step": 1}\n{"step": 3}\n{"step": ')  # as a kill may leave them
    assert runs.train(first, queue, str(tokens)) == whole
    assert numbers.read_text() == '{"step": 1}\n'
    steps = [json.loads(line) for line in (queue.folder(first) / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps if "loss" in one] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        ([700, 0, 700, 1900, 0], runs.LOST),  # wherever another process ends
        ([700, 0, 700, 1900, 700], runs.FAILED),
        ([0, 0, 0], runs.FAILED),
    ],
)
def test_a_run_has_failed_when_it_is_lost_at_one_step_for_the_third_time(
    steps: list[int], outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(plan.setting_runs())

    left = iter(steps)

    def fault(_: Any, queue: Any, __: str) -> float:
        queue.reached = next(left)
        raise RuntimeError("CUDA error: unspecified launch failure")

    def new_process(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(runs, "has_gpu", lambda _: True)
    monkeypatch.setattr(runs, "train", fault)
    monkeypatch.setattr(runs.os, "execve", new_process)
    for _ in steps:
        queue = runs.Queue(tmp_path, LATER)
        assert not queue.is_done(first)
        with pytest.raises(InterruptedError):
            runs.work(queue, "tokens")
    assert queue.is_done(first) is (outcome == runs.FAILED)
    words = [line.split()[1:] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert [one[:4] for one in words] == [
        [one, first.name, "after", "step"] for one in [runs.LOST] * (len(steps) - 1) + [outcome]
    ]


@pytest.mark.parametrize(
    "problem",
    [
        RunError("the model could not be written to one/model, because the disk is full"),
        OSError(28, "No space left on device", "metrics.jsonl"),
        RuntimeError("InductorError: OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_full_disk_stops_a_process_and_its_run_is_made_later(
    problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> float:
        raise problem

    monkeypatch.setattr(runs, "has_gpu", lambda _: True)
    monkeypatch.setattr(runs, "train", full)
    queue = runs.Queue(tmp_path, LATER)
    with pytest.raises(SystemExit, match="call again"):
        runs.work(queue, "tokens")
    first, second, *_ = plan.setting_runs()
    assert list(queue.held) == [first.name]
    assert f"stopped at {first.name}: " in (tmp_path / "log.txt").read_text()
    queue.held.clear()  # as its process has ended
    assert [queue.claim(), queue.claim()] == [first, second]


def test_looking_whether_a_run_is_made_hides_it_from_no_other_process(tmp_path: Path) -> None:
    queue, looked = runs.Queue(tmp_path, LATER), threading.Event()
    first = queue.claim()
    queue.held.clear()  # killed

    class Slow(runs.Queue):  # type: ignore[misc, name-defined]
        def is_running(self, run: Any) -> bool:
            lock = runs.try_lock(self.claim_of(run) / runs.LOCK) if run == first else None
            if lock is not None:
                looked.set()
                time.sleep(0.2)
                lock.release()
            return False

    looking = threading.Thread(target=Slow(tmp_path, 0.0).claim)
    looking.start()
    assert looked.wait(10)
    assert queue.claim() == first
    looking.join()


def test_records_from_elsewhere_count_as_runs_that_are_made(tmp_path: Path) -> None:
    queue, (first, second, *_) = runs.Queue(tmp_path, LATER), plan.setting_runs()
    finish(queue, first, 3.1)  # unpacked, without the claim
    assert queue.claim() == second


def test_runs_in_the_recorded_list_count_as_made(tmp_path: Path) -> None:
    made = runs.recorded_losses(ROOT / "results" / "arena" / "runs.json")
    queue = runs.Queue(tmp_path, LATER, made=made)
    recorded = plan.Run("none", 16, plan.RECORDED)
    assert queue.is_done(recorded)
    assert queue.loss(recorded) == made[recorded.name]
    claimed = [run.name for run in iter(queue.claim, None)]
    assert len(claimed) == 12  # of four settings and three seeds each
    assert made.keys().isdisjoint(claimed)


def test_no_run_starts_that_would_end_too_late(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, time.time() + 100, typical=150)
    assert queue.claim() is None
    queue.typical = 50
    assert queue.claim() is not None


def test_fewer_runs_side_by_side_end_sooner(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, time.time() + 100, typical=150, jobs=10)
    claimed = [queue.claim() for _ in range(8)]
    assert sum(run is not None for run in claimed) == 6  # a seventh would make all of them too late
    finish(queue, claimed[0], 3.0)
    assert queue.claim() is not None


def call(monkeypatch: pytest.MonkeyPatch, *options: object) -> object:
    """The exit code of the script."""
    monkeypatch.setattr(runs.sys, "argv", ["arena_runs.py", *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        runs.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "nowhere"], "no token store of it in nowhere"),
        (["--made", "nowhere.json"], "nowhere.json"),
        (["--made", "short.json"], "a record in short.json (one) has no kind, command"),
        (["--made", "others.json"], "was trained on other texts than those in tokens"),
        (["--pack", "nowhere/pack.tar.xz"], "nowhere/"),
        (["--times", "nowhere.json"], "nowhere.json"),
        (["--times", "plain.json"], "plain.json has no times of high-key-bias:learned"),
        ([], "name the folder of token stores by --tokens"),
        (["--jobs", "0"], "--jobs must be at least 1, not 0"),
    ],
)
def test_a_wrong_path_is_refused_in_a_sentence_before_anything_starts(
    options: list[str],
    words: str,
    miniature: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokens, out = miniature
    monkeypatch.chdir(tokens.parent)
    if "--pack" in options:
        out.mkdir()
    if "nowhere" in options:  # nor is the text there, from which tokens could be made
        (tokens.parent / "text.txt").unlink()
    if options and "--tokens" not in options:
        options = [*options, "--tokens", "tokens"]
    other = {**RECORDS[0], "run": next(plan.setting_runs()).name}
    Path("others.json").write_text(json.dumps([other]))
    Path("short.json").write_text(json.dumps([{"run": "one"}]))
    times = MUON_TIMES.setting | {"seconds": {"none": [1.0], "high:learned": [1.0]}, "environment": {}}
    Path("plain.json").write_text(json.dumps(times))
    assert call(monkeypatch, *options, "--out", out) == 2
    assert words in capsys.readouterr().err
    assert not list(out.glob("*"))


def test_without_a_gpu_nothing_is_started_and_no_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert call(monkeypatch, "--tokens", tmp_path, "--out", tmp_path) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no longer"):
        runs.work(runs.Queue(tmp_path, LATER), "tokens")
    assert not list(tmp_path.glob("*"))


def test_workers_are_tied_to_their_parent_and_a_killed_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, stat\n"
        "print(os.environ['SAOBP_END_WITH_INPUT'], stat.S_ISFIFO(os.fstat(0).st_mode), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(runs, "__file__", str(script))
    monkeypatch.setattr(runs, "check", lambda *_: None)
    ended = call(monkeypatch, "--tokens", "tokens", "--out", tmp_path / "out", "--jobs", 1)
    assert ended == f"ended early, see {tmp_path / 'out' / 'log.txt'} and worker-0.log"
    assert (tmp_path / "out" / "worker-0.log").read_text() == "1 True\n"


def test_a_worker_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(runs, "end_with_parent", lambda: done.append("watched"))
    monkeypatch.setattr(runs, "work", lambda *_: done.append("worked"))
    monkeypatch.setattr(runs.sys, "argv", ["", "--worker", "--tokens", "tokens", "--out", str(tmp_path)])
    runs.main()
    assert done == ["watched", "worked"]


def test_the_whole_queue_in_miniature(miniature: tuple[Path, Path], tmp_path: Path) -> None:
    tokens, out = miniature
    for name in ("runs", "claims"):
        (out / name).mkdir(parents=True)
    runs.work(runs.Queue(out, LATER), str(tokens))
    lines = (out / "log.txt").read_text().splitlines()
    losses = runs.Queue(out, LATER).tuned()
    setting = plan.chosen_setting(losses)
    assert setting is not None
    rate = plan.chosen_rate(setting, losses)
    chosen = [line.partition(" chosen ")[2] for line in lines if ", loss " not in line]
    form = plan.chosen_form(setting, losses)
    assert sum(", loss " in line for line in lines) == 16 + (0 if form is None else 3)
    assert chosen == [
        f"setting: {setting}",
        f"rate of small: {rate}",
        "penalties: entropy,weight=1",
        f"form: {'as usual' if form is None else 'high:learned later'}",
    ]
    small, books = f"small-{setting}-rate-{rate}", f"mini-{setting}-books"
    names = [f"modernbert-{one}-{method}-31" for one in (small, books) for method in FORMS]
    compared = ("original", "learned-qk-norm", "gate", "sinkhorn-3")
    names += [f"modernbert-mini-{setting}-{method}-51" for method in compared]
    assert all((out / "runs" / name / "model").is_dir() for name in names)
    failed = next((out / "claims").iterdir()) / runs.FAILED
    failed.touch()
    runs.pack(out, tmp_path / "records.tar.xz")
    with tarfile.open(tmp_path / "records.tar.xz") as archive:
        archive.extractall(tmp_path / "back", filter="data")
    back = tmp_path / "back"
    assert not list(back.rglob("model"))
    assert (back / "log.txt").exists()
    assert [path.name for path in back.glob("claims/*/*")] == [failed.name]
    done = CliRunner().invoke(
        app, ["arena", str(back / "runs"), "--out", str(tmp_path / "results"), "--fresh", "31,51"]
    )
    assert done.exit_code == 0, done.output
    assert "fresh seeds 31, 51" in (tmp_path / "results" / "arena" / "README.md").read_text()

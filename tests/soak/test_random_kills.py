"""SIGKILL at random moments, resume, kill again: in the end the files of an uninterrupted run, bit for bit.

This process has imported everything; runs are its forks, so that a kill costs no more than what it destroys.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tally import Soak

from saobp.cli import app
from saobp.data.tasks import load_task
from saobp.lab.synthetic_tasks import write_tasks
from saobp.runs.folder import FinishedRunError
from saobp.testing.tiny_models import save_tiny_bert
from saobp.testing.tiny_training import forked, small_recipe, train_small
from saobp.training.finetune import finetune, recipe_for

pytestmark = pytest.mark.slow

MOST_KILLS_OF_A_RUN = 12
PRETRAINING = (
    {"dropout": 0.1, "refinement": "high:learned", "accumulation": 2},
    {"family": "gpt2", "refinement": "low:0.3", "checkpoint_steps": 3},
    {"refinement": "elemmul", "regularizer": "entropy,weight=0.1"},
)
SHARES = {**{f"pretraining {number}": 0.8 / 3 for number in range(3)}, "fine-tuning": 0.15, "reproduce": 0.05}
"""Of all kills."""
TIMES = ("seconds", "per_second", "time")
NUMBERS = (".json", ".jsonl", ".safetensors", ".npy", ".bin", ".csv")


@dataclass(frozen=True)
class Work:
    """One kind of run: ``start`` begins or resumes it in a folder."""

    name: str
    start: Callable[[Path], object]


def works(root: Path) -> list[Work]:
    data = write_tasks(root / "data", rows=24)
    bert = save_tiny_bert(root / "bert", "high:learned")

    def pretrain(recipe: dict[str, Any]) -> Callable[[Path], object]:
        def start(folder: Path) -> None:
            with suppress(FinishedRunError):  # killed between its last file and its end
                train_small(small_recipe(**recipe), folder, resume=True)

        return start

    def tune(folder: Path) -> object:
        recipe = recipe_for("cola", epochs=3, batch=8, length=32)
        task = load_task("cola", data)
        return finetune(
            bert, task, folder, seeds=[1, 2], recipe=recipe, checkpoint_seconds=0.0, notify=lambda _: None
        )

    def reproduce(folder: Path) -> object:
        line = ["reproduce", "gtd", "--scale", "smoke", "--seeds", "1", "--only", "*-high-0.2-*"]
        return app([*line, "--runs", str(folder)], standalone_mode=False)

    kinds = [Work(f"pretraining {number}", pretrain(recipe)) for number, recipe in enumerate(PRETRAINING)]
    return [*kinds, Work("fine-tuning", tune), Work("reproduce", reproduce)]


def record(folder: Path) -> dict[str, Any]:
    """What a finished run left: numbers of its JSON files without times, checksums of the others.

    Records of runs say when and how often a run was begun, which is what kills change.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in NUMBERS and path.is_file()]
    return {
        str(path.relative_to(folder)): content(path)
        for path in files
        if path.name != "record.json" and not path.name.endswith("-runs.json")
    }


def content(path: Path) -> Any:
    if path.suffix == ".json":
        return timeless(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return [timeless(json.loads(line)) for line in path.read_text().splitlines()]
    return hashlib.sha256(path.read_bytes()).hexdigest()


def timeless(value: Any) -> Any:
    """Without what may differ between two runs of the same."""
    if isinstance(value, dict):
        return {k: timeless(own) for k, own in value.items() if not any(word in k for word in TIMES)}
    return [timeless(own) for own in value] if isinstance(value, list) else value


def ran_to_the_end(work: Work, folder: Path, log: Path) -> float:
    """Seconds that it took; fails with what the run said where it ends badly."""
    began = time.monotonic()
    process = forked(lambda: quietly(work, folder, log))
    process.join()
    assert process.exitcode == 0, f"{work.name} ended with {process.exitcode}: {log.read_text()[-2000:]}"
    return time.monotonic() - began


def quietly(work: Work, folder: Path, log: Path) -> None:
    with log.open("w") as file:
        sys.stdout = sys.stderr = file
        try:
            work.start(folder)
        except BaseException:
            traceback.print_exc()
            raise


def kill_and_resume(work: Work, folder: Path, kills: int, usual: float, draw: random.Random) -> int:
    """Kill so many times or until the run has ended before its kill, then let it end; returns the kills."""
    log, done = folder.with_suffix(".log"), 0
    for _ in range(kills):
        process = forked(lambda: quietly(work, folder, log))
        process.join(usual * draw.random() ** 2)  # often early: what is resumed is shorter
        if process.exitcode is not None:
            assert process.exitcode == 0, f"{work.name} ended badly: {log.read_text()[-2000:]}"
            return done
        process.kill()
        process.join()
        done += 1
    ran_to_the_end(work, folder, log)
    return done


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    names = sorted(found.keys() | expected.keys())
    return [name for name in names if found.get(name) != expected.get(name)]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Work]:
    return {work.name: work for work in works(tmp_path_factory.mktemp("inputs"))}


@pytest.mark.parametrize("name", SHARES)
def test_killed_runs_end_as_uninterrupted_ones(
    name: str, kinds: dict[str, Work], soak: Soak, tmp_path: Path
) -> None:
    work, draw, tally = kinds[name], soak.random("kills"), soak.tally(f"kills of {name}")
    straight, folder = tmp_path / "straight", tmp_path / "run"
    ran_to_the_end(work, straight, tmp_path / "straight.log")
    usual = ran_to_the_end(work, tmp_path / "timed", tmp_path / "straight.log")
    expected, done, runs, wanted = record(straight), 0, 0, round(SHARES[name] * soak.counts["kills"])
    assert expected
    while done < wanted:
        kills = min(wanted - done, draw.randint(1, MOST_KILLS_OF_A_RUN))
        try:
            killed = kill_and_resume(work, folder, kills, usual, draw)
            wrong = differences(record(folder), expected)
        except AssertionError as problem:
            killed, wrong = kills, [str(problem)]
        done, runs = done + killed, runs + 1
        if wrong:
            tally.wrong.append(f"run {runs}, killed {killed} times: {', '.join(wrong)}")
        else:
            tally.outcomes["resumed bit for bit"] += killed
        shutil.rmtree(folder, ignore_errors=True)
    tally.what += f" ({runs} runs)"
    assert not tally.wrong, tally.wrong[:5]

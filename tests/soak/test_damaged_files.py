"""Files damaged at random: a command refuses them in a sentence, or ends with the same numbers.

Where files carry checksums, other numbers are wrong. Data of users and the tolerant page carry none; there a
crash is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tally import Soak
from test_random_kills import timeless

from saobp.cli import app
from saobp.commands.streams import error_message
from saobp.data.tasks import load_task
from saobp.lab.synthetic_tasks import write_tasks
from saobp.testing.tiny_models import save_tiny_bert
from saobp.testing.tiny_training import forked, prose, small_recipe, train_small
from saobp.training import trainer
from saobp.training.dataset import find_pretraining_data
from saobp.training.finetune import finetune, recipe_for
from saobp.training.finetune.trainer import TaskTrainer

pytestmark = pytest.mark.slow

RECIPE = {"dropout": 0.1, "refinement": "high:learned", "checkpoint_steps": 3}
CRASHED = "crashed"
DAMAGES = ("flip", "flip", "cut", "empty", "zeros", "garbage", "other JSON", "gone", "longer", "swap")
OTHER_JSON = (b"[]", b"{}", b"7", b"null", b'"text"', b"[[[", b"NaN", b'{"a": []}')


@dataclass(frozen=True)
class Reader:
    """Something that reads a folder: ``numbers`` returns what it found there."""

    name: str
    folder: Path
    numbers: Callable[[Path], Any]
    guarded: bool = True
    """Whether checksums tell damage, so that other numbers are wrong."""


def readers(root: Path) -> list[Reader]:
    data = write_tasks(root / "data", rows=16)
    model = save_tiny_bert(root / "model", "high:learned")
    (root / "corpus.txt").write_text(prose(60))
    cola = recipe_for("cola", epochs=3, batch=8, length=32)
    task = load_task("cola", data)

    def resumed(folder: Path) -> Any:
        train_small(small_recipe(**RECIPE), folder, resume=True)
        weights = hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
        return [timeless(json.loads((folder / "result.json").read_text())), weights]

    def tuned(folder: Path) -> Any:
        return timeless(finetune(model, task, folder, seeds=[1], recipe=cola, checkpoint_seconds=0.0))

    def tuned_from(folder: Path) -> Any:
        out = folder.with_name("tuned-from")
        shutil.rmtree(out, ignore_errors=True)
        return timeless(
            finetune(folder, task, out, seeds=[1], recipe=recipe_for("cola", epochs=1, length=32))
        )

    def diagnosed(folder: Path) -> Any:
        out = folder.with_name("diagnosis")
        shutil.rmtree(out, ignore_errors=True)
        command("diagnose", str(folder), "--text", str(root / "corpus.txt"), "--length", "16", "--limit", "4",
                "--out", str(out))  # fmt: skip
        return json.loads((out / "diagnosis.json").read_text())[0]["heads"]

    def reported(folder: Path) -> Any:
        page = folder.with_name("page.html")
        page.unlink(missing_ok=True)
        command("report", str(folder), "--out", str(page))

    def tokens(folder: Path) -> Any:
        found = find_pretraining_data(
            "bert", str(root / "corpus.txt"), length=16, seed=0, tokens=folder, vocabulary=60
        )
        rows = found.train.at(range(len(found.train)))["input_ids"]
        return hashlib.sha256(rows.numpy().tobytes()).hexdigest()

    def rows(folder: Path) -> Any:
        for name in ("cola", "squad", "race-middle"):
            load_task(name, folder)

    stop(root / "unfinished", 6, lambda folder: train_small(small_recipe(**RECIPE), folder))
    stop(root / "untuned", 4, tuned)
    train_small(small_recipe(**RECIPE), root / "run")
    tokens(root / "tokens")
    return [
        Reader("resumed pretraining", root / "unfinished", resumed),
        Reader("resumed fine-tuning", root / "untuned", tuned),
        Reader("fine-tuning a run's model", root / "run", tuned_from),
        Reader("saobp diagnose of a run's model", root / "run", diagnosed),
        Reader("token stores", root / "tokens", tokens),
        Reader("saobp diagnose of a saved model", model, diagnosed, guarded=False),
        Reader("task files", data, rows, guarded=False),
        Reader("saobp report", root / "run", reported, guarded=False),
    ]


def command(*line: str) -> None:
    """A command as the shell runs it; exit code 1 or 2 is a refusal, which the log explains."""
    try:
        app(list(line), standalone_mode=True)
    except SystemExit as ended:
        if ended.code:
            raise RefusedError from None


class RefusedError(Exception):
    """A command has said why."""


def stop(folder: Path, steps: int, work: Callable[[Path], object]) -> None:
    """A run that is killed once it has a checkpoint of so many steps."""

    def deadly() -> None:
        for kind in (trainer.PretrainTrainer, TaskTrainer):
            saved = kind._save_checkpoint

            def save(self: Any, *given: Any, saved: Any = saved) -> None:
                saved(self, *given)
                if self.state.global_step >= steps:
                    os._exit(9)

            kind._save_checkpoint = save
        work(folder)

    process = forked(deadly)
    process.join()
    assert process.exitcode == 9


def damage(folder: Path, draw: random.Random) -> str:
    """Damage one file; returns what was done to which."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    path = draw.choice(files)
    content = bytearray(path.read_bytes())
    kind = draw.choice(
        ("flip", "flip", "cut", "empty", "zeros", "garbage", "other JSON", "gone", "longer", "swap")
    )
    if kind == "flip":
        for _ in range(draw.choice((1, 1, 4))):
            if content:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[draw.randrange(len(content) + 1) :]
    elif kind == "empty":
        content.clear()
    elif kind == "zeros":
        start = draw.randrange(len(content) + 1)
        content[start : start + 64] = bytes(len(content[start : start + 64]))
    elif kind == "garbage":
        content = bytearray(draw.randbytes(draw.randint(1, 400)))
    elif kind == "other JSON":
        content = bytearray(
            draw.choice((b"[]", b"{}", b"7", b"null", b'"text"', b"[[[", b"NaN", b'{"a": []}'))
        )
    elif kind == "longer":
        content += draw.choice((b"\0" * 9, b"\n", b"{}\n", draw.randbytes(30)))
    elif kind == "swap":
        content = bytearray(draw.choice(files).read_bytes())
    path.unlink()
    if kind != "gone":
        path.write_bytes(content)
    return f"{kind} in {path.relative_to(folder)}"


def outcome(reader: Reader, folder: Path) -> tuple[str, Any]:
    """What a fork makes of the folder: its numbers, a sentence, or a crash with what it printed."""
    answer, log = folder.with_name("answer.json"), folder.with_name("log.txt")
    answer.unlink(missing_ok=True)

    def read() -> None:
        with log.open("w") as file:
            sys.stdout = sys.stderr = file
            try:
                found = ["numbers", reader.numbers(folder)]
            except RefusedError:
                found = ["refused", ""]
            except (ValueError, TypeError, OSError) as problem:
                traceback.print_exc() if isinstance(problem, TypeError) else None
                found = ["refused", error_message(problem)]
            answer.write_text(json.dumps(found))

    process = forked(read)
    process.join(300)
    said = log.read_text(errors="replace")
    if process.exitcode != 0 or not answer.exists() or "Traceback (most recent call last)" in said:
        process.kill()
        return CRASHED, said[-1500:]
    how, found = json.loads(answer.read_text())
    return (CRASHED, found) if how == "refused" and "\n" in found.strip() else (how, found)


def test_damaged_files_are_refused_or_harmless(soak: Soak, tmp_path: Path) -> None:
    draw, failed = soak.random("files"), []
    kinds = readers(tmp_path / "whole")
    copy = tmp_path / "damaged" / "folder"
    for number, reader in enumerate(kinds):
        tally = soak.tally(f"damaged files: {reader.name}")
        shutil.copytree(reader.folder, copy)
        how, expected = outcome(reader, copy)
        shutil.rmtree(copy)
        assert how == "numbers", f"{reader.name} fails on whole files: {expected}"
        for _ in range(soak.counts["files"] // len(kinds) + (number < soak.counts["files"] % len(kinds))):
            shutil.copytree(reader.folder, copy)
            done = damage(copy, draw)
            how, found = outcome(reader, copy)
            if how == CRASHED:
                tally.wrong.append(f"{done}: {found}")
            elif how == "refused":
                tally.outcomes["refused"] += 1
            elif found == expected:
                tally.outcomes["same numbers" if expected is not None else "read"] += 1
            elif reader.guarded:
                tally.wrong.append(f"{done}: other numbers")
            else:
                tally.outcomes["read as it is"] += 1
            shutil.rmtree(copy, ignore_errors=True)
        failed += tally.wrong
    assert not failed, failed[:5]

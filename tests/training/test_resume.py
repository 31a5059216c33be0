"""Kill -9 at any moment, resume: the same losses as without interruption, bit for bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from saobp.runs.folder import FinishedRunError, RunError, RunFolder
from saobp.storage import manifest
from saobp.testing.tiny_training import forked, small_recipe, train_small
from saobp.training import trainer

RECIPE = {"dropout": 0.1, "refinement": "high:learned", "accumulation": 2}


def losses(run: RunFolder) -> list[dict[str, Any]]:
    """Everything in the metrics but the time."""
    timeless = ("seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in timeless} for line in run.metrics()]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_from_outside(folder: Path, lines: int) -> None:
    """A run that is killed as soon as its metrics have so many lines."""
    process = forked(lambda: train_small(small_recipe(**RECIPE), folder, resume=True))
    metrics = folder / "metrics.jsonl"
    while process.is_alive() and not (metrics.exists() and metrics.read_text().count("\n") >= lines):
        time.sleep(0.001)
    assert process.is_alive(), "the run ended before it could be killed"
    process.kill()
    process.join()


def killed_from_inside(folder: Path, module: Any, name: str, at: str) -> None:
    """A run that dies just before or just after a function is called for the first time."""

    def work() -> None:
        original = getattr(module, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            if at == "after":
                original(*args, **kwargs)
            die()

        setattr(module, name, deadly)
        train_small(small_recipe(**RECIPE), folder, resume=True)

    process = forked(work)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_run_killed_many_times_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    straight = RunFolder(tmp_path / "straight")
    train_small(small_recipe(**RECIPE), straight.path)
    expected = losses(straight)
    assert len([line for line in expected if "loss" in line]) == 12

    run = RunFolder(tmp_path / "killed")
    killed_from_inside(run.path, manifest, "write_json", "before")
    killed_from_outside(run.path, 1)
    killed_from_inside(run.path, trainer, "seal", "before")
    assert run.last_good_checkpoint() is None
    killed_from_inside(run.path, trainer, "seal", "after")
    assert run.last_good_checkpoint() == 2
    killed_from_outside(run.path, 4)
    killed_from_inside(run.path, trainer.PretrainTrainer, "_save_rng_state", "after")
    killed_from_outside(run.path, 9)
    killed_from_inside(run.path, RunFolder, "save_model", "after")
    killed_from_inside(run.path, RunFolder, "finish", "before")
    assert not run.is_finished
    train_small(small_recipe(**RECIPE), run.path, resume=True)

    assert losses(run) == expected
    assert [line["step"] for line in run.health()] == [4, 8, 12]
    assert run.health() == straight.health()
    timeless = [{k: v for k, v in r.items() if "seconds" not in k and "per_second" not in k}
                for r in (run.result, straight.result)]  # fmt: skip
    assert timeless[0] == timeless[1]
    weights = [(one.model / "model.safetensors").read_bytes() for one in (run, straight)]
    assert weights[0] == weights[1]
    assert not run.checkpoints.exists()


def test_a_corrupt_checkpoint_falls_back_and_ends_the_same(tmp_path: Path) -> None:
    recipe = small_recipe(dropout=0.1, regularizer="entropy,weight=0.1")
    straight = RunFolder(tmp_path / "straight")
    train_small(recipe, straight.path)

    run = RunFolder(tmp_path / "run")
    process = forked(lambda: stop_after_checkpoint(recipe, run.path, 6))
    process.join()
    assert run.checkpoint_steps() == [4, 6]
    weights = run.checkpoint_path(6) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    said: list[str] = []
    train_small(recipe, run.path, resume=True, notify=said.append)
    assert said == [
        "The checkpoint of step 6 is left out, because model.safetensors is not what was written."
    ]
    assert losses(run) == losses(straight)


def stop_after_checkpoint(recipe: Any, folder: Path, step: int) -> None:
    original = RunFolder.drop_old_checkpoints

    def drop(self: RunFolder, *args: Any) -> None:
        original(self, *args)
        if self.checkpoint_steps()[-1] == step:
            die()

    RunFolder.drop_old_checkpoints = drop  # type: ignore[method-assign]
    train_small(recipe, folder)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = trainer.PretrainTrainer._save_rng_state

    def full(self: Any, folder: str) -> None:
        if self.state.global_step == 4:
            raise OSError(28, "No space left on device")
        original(self, folder)

    monkeypatch.setattr(trainer.PretrainTrainer, "_save_rng_state", full)
    seen: list[list[int]] = []
    saved = trainer.PretrainTrainer._save_checkpoint

    def watched(self: Any, *args: Any) -> None:
        saved(self, *args)
        seen.append(self.run.checkpoint_steps())

    monkeypatch.setattr(trainer.PretrainTrainer, "_save_checkpoint", watched)
    said: list[str] = []
    train_small(small_recipe(steps=8), tmp_path, notify=said.append)
    assert said == [
        "The checkpoint of step 4 could not be written (the disk is full); the last good "
        "one is of step 2, and the run goes on."
    ]
    assert seen == [[2], [2], [2, 6], [2, 6]]
    assert RunFolder(tmp_path).is_finished


def test_a_resumed_run_knows_of_the_checkpoint_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    forked(lambda: stop_after_checkpoint(small_recipe(steps=6), tmp_path, 2)).join()
    monkeypatch.setattr(trainer.PretrainTrainer, "_save_rng_state", full)
    said: list[str] = []
    train_small(small_recipe(steps=6), tmp_path, resume=True, notify=said.append)
    assert said == [
        "The checkpoint of step 4 could not be written (the disk is full); the last good "
        "one is of step 2, and the run goes on."
    ]


def test_one_process_at_a_time_works_on_a_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    first = forked(lambda: train_small(small_recipe(steps=10**6, warmup_steps=1), run.path))
    while not run.metrics():
        time.sleep(0.01)
    with pytest.raises(RunError, match="another process is at work on the run in"):
        train_small(small_recipe(steps=10**6, warmup_steps=1), run.path, resume=True)
    first.kill()
    first.join()
    assert run.record["status"] == "running"
    with pytest.raises(RunError, match="another steps"):
        train_small(small_recipe(steps=4), run.path, resume=True)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe(steps=4)
    with monkeypatch.context() as broken:
        broken.setattr(trainer.PretrainTrainer, "evaluate", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_small(recipe, tmp_path)
    assert RunFolder(tmp_path).record["status"] == "failed"
    with pytest.raises(RunError, match="add --resume"):
        train_small(recipe, tmp_path)
    with pytest.raises(RunError, match="another batch_size"):
        train_small(small_recipe(steps=4, batch_size=8), tmp_path, resume=True)
    train_small(recipe, tmp_path, resume=True)
    before = (tmp_path / "result.json").read_text()
    for resume in (True, False):
        with pytest.raises(FinishedRunError, match=r"its result is in .*result\.json"):
            train_small(recipe, tmp_path, resume=resume)
    assert (tmp_path / "result.json").read_text() == before


def test_a_disk_that_is_full_at_the_end_is_one_sentence_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        with pytest.raises(RunError, match="model, because the disk is full"):
            train_small(small_recipe(steps=3, checkpoint_steps=100), tmp_path)
    run = RunFolder(tmp_path)
    assert (run.is_finished, run.record["status"]) == (False, "failed")
    train_small(small_recipe(steps=3, checkpoint_steps=100), tmp_path, resume=True)
    assert run.is_finished

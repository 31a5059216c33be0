"""Run folders: whole or absent, never silently repeated, and able to fall back."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest

from saobp.runs import folder as folder_module
from saobp.runs.folder import FinishedRunError, RunError, RunFolder
from saobp.runs.layout import LOCK
from saobp.storage import json_files
from saobp.storage.locks import BaseFileLock, try_lock
from saobp.storage.manifest import MANIFEST

RECIPE = {"size": "tiny", "betas": (0.9, 0.98), "refinement": None}


def started(path: Path, **options):  # type: ignore[no-untyped-def]
    options = {"seed": 42, "data": {"prose": "abc"}} | options
    return RunFolder.start(path, "pretrain", RECIPE, **options)


def fill_the_disk(folder: Path) -> None:
    (folder / "weights").write_text("4")
    raise OSError(errno.ENOSPC, "disk full")


def test_a_new_run_says_what_it_is(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    assert run.recipe == {"kind": "pretrain", "size": "tiny", "betas": [0.9, 0.98], "refinement": None}
    record = run.record
    assert record["status"] == "running"
    assert record["seed"] == 42
    assert record["data"] == {"prose": "abc"}
    assert set(record["environment"]) == {
        "python",
        "torch",
        "transformers",
        "saobp",
        "hardware",
        "processes",
        "jobs",
    }
    assert {"command", "commit", "started", "finished", "seconds"} <= set(record)


def test_a_finished_run_is_neither_repeated_nor_resumed(tmp_path: Path) -> None:
    run = started(tmp_path)
    with run.checkpoint(1) as folder:
        (folder / "weights").write_text("1")
    run.finish({"loss": 1.0}, seconds=2.0)
    assert run.record["status"] == "finished"
    assert run.record["seconds"] == 2.0
    assert not run.checkpoints.exists()
    for resume in (False, True):
        with pytest.raises(FinishedRunError, match=r"result\.json"):
            started(tmp_path, resume=resume)
    assert run.result == {"loss": 1.0}


def test_a_run_that_finishes_while_it_is_asked_for_stays_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path)
    run.fail()

    def lock_after_the_end(file: Path) -> BaseFileLock | None:
        run.finish({"loss": 1.0}, seconds=2.0)
        return try_lock(file)

    monkeypatch.setattr(folder_module, "try_lock", lock_after_the_end)
    with pytest.raises(FinishedRunError):
        started(tmp_path, resume=True)
    assert run.record["status"] == "finished"
    lock = try_lock(run.file(LOCK))
    assert lock is not None, "the lock is still held"
    lock.release()


def test_an_unfinished_run_needs_resume_and_the_same_recipe_and_data(tmp_path: Path) -> None:
    run = started(tmp_path)
    began = run.record["started"]
    with pytest.raises(RunError, match="unfinished run: add --resume"):
        started(tmp_path)
    with pytest.raises(RunError, match="another size"):
        RunFolder.start(tmp_path, "pretrain", {**RECIPE, "size": "mini"}, seed=42, resume=True)
    with pytest.raises(RunError, match="the data prose"):
        started(tmp_path, data={"prose": "abd"}, resume=True)
    assert started(tmp_path, resume=True).record["started"] == began


def test_the_held_out_share_belongs_to_the_data(tmp_path: Path) -> None:
    """Another share means other training rows, though texts and recipe are the same."""
    assert started(tmp_path, held_out=0.01).record["held_out"] == 0.01
    with pytest.raises(RunError, match=r"held-out share of 0\.01, not 0\.3: give --held-out 0\.01"):
        started(tmp_path, held_out=0.3, resume=True)
    assert started(tmp_path, held_out=0.01, resume=True).record["status"] == "running"


def test_a_folder_of_other_things_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="holds no run"):
        started(tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_leftovers_of_a_kill_go(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-recipe.json").write_text("{")
    run = started(tmp_path)
    left = run.checkpoints / ".unfinished-step-000003"
    left.mkdir(parents=True)
    started(tmp_path, resume=True)
    assert not left.exists()


def test_checkpoints_are_whole_or_absent_and_two_are_kept(tmp_path: Path) -> None:
    run = started(tmp_path)
    for step in (1, 2, 3):
        with run.checkpoint(step) as folder:
            (folder / "weights").write_text(str(step))
    with pytest.raises(OSError, match="full"), run.checkpoint(4) as folder:
        fill_the_disk(folder)
    assert run.checkpoint_steps() == [2, 3]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000002", "step-000003"]
    assert run.last_good_checkpoint() == 3


@pytest.mark.parametrize("harm", ["change", "remove", "manifest", "no manifest"])
def test_a_corrupt_checkpoint_falls_back_with_one_sentence(tmp_path: Path, harm: str) -> None:
    run = started(tmp_path)
    for step in (1, 2):
        with run.checkpoint(step) as folder:
            (folder / "weights").write_text("w" * step)
    last = run.checkpoint_path(2)
    if harm == "change":
        (last / "weights").write_text("wx")
    elif harm == "remove":
        (last / "weights").unlink()
    elif harm == "manifest":
        (last / MANIFEST).write_text("{")
    else:
        (last / MANIFEST).unlink()
    said: list[str] = []
    assert run.last_good_checkpoint(said.append) == 1
    assert len(said) == 1
    assert said[0].startswith("The checkpoint of step 2 is left out, because ")


def test_rewinding_drops_later_and_torn_lines(tmp_path: Path) -> None:
    run = started(tmp_path)
    for step in (1, 2, 3):
        run.log_metrics({"step": step, "loss": 1 / step})
        run.log_health({"step": step})
    with run.file("metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    run.rewind(2)
    assert [line["step"] for line in run.metrics()] == [1, 2]
    assert [line["step"] for line in run.health()] == [1, 2]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step" 2}\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"line 2, column 9"):
        json_files.read_lines(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    json_files.write_json(path, {"status": "running"})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        json_files.write_json(path, {"status": "finished"})
    assert json.loads(path.read_text()) == {"status": "running"}
    assert [one.name for one in tmp_path.iterdir()] == ["record.json"]


def test_the_record_names_no_place_and_the_commit_that_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the tree elsewhere knows its commit only if it is told."""
    line = [
        "/some/where/__main__.py",
        "pretrain",
        "--tokens",
        "/else/where/tokens",
        "--out=~/runs/one/",
        "--corpus",
        "/some/a.txt:0.6,/else/b.txt:0.4",
        "a/b",
    ]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setenv("SAOBP_COMMIT", "1a2b3c4")
    monkeypatch.setenv("SAOBP_JOBS", "3")
    record = started(tmp_path / "run").record
    assert record["command"] == "saobp pretrain --tokens tokens --out=one --corpus a.txt:0.6,b.txt:0.4 a/b"
    assert record["commit"] == "1a2b3c4"
    assert record["environment"]["jobs"] == 3


def test_a_run_killed_before_its_clean_up_is_cleaned_when_it_is_next_asked_for(tmp_path: Path) -> None:
    run = started(tmp_path)
    with run.checkpoint(1) as folder:
        (folder / "weights").write_text("1")
    json_files.write_json(run.file("result.json"), {"loss": 1.0})
    with pytest.raises(FinishedRunError):
        started(tmp_path, resume=True)
    assert not run.checkpoints.exists()
    assert not run.file(LOCK).exists()


def test_a_run_that_a_full_disk_ended_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no new file can be written, the status is changed inside the old one."""
    run = started(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    run.fail(3.0)
    assert run.record["status"] == "failed"
    assert run.record["seed"] == 42


@pytest.mark.parametrize("content", ["[1, 2]", "3", "{", "\udcff"])
def test_a_recipe_that_is_no_object_is_named(tmp_path: Path, content: str) -> None:
    started(tmp_path)
    (tmp_path / "recipe.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"recipe\.json (holds no JSON object|is not JSON)"):
        started(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1]", "line 1 holds no JSON object"),
        ("7", "line 1 holds no JSON object"),
        ('{"a": []}', "a line has no step"),
        ('{"step": "2"}', "a line has no step"),
    ],
)
def test_a_line_that_is_none_of_a_log_is_named(tmp_path: Path, line: str, problem: str) -> None:
    run = started(tmp_path)
    run.file("metrics.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=rf"metrics\.jsonl: {problem}"):
        run.rewind(0)


def test_a_full_disk_names_the_file_that_could_not_be_written(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            json_files.append_line(tmp_path / "metrics.jsonl", {"text": "x" * 9000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == str(tmp_path / "metrics.jsonl")


def test_logs_are_on_the_disk_before_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut no line is lost that the checkpoint counts on."""
    run = started(tmp_path)
    forced: list[str] = []
    monkeypatch.setattr("saobp.runs.folder.fsync", lambda path: forced.append(path.name))
    run.log_metrics({"step": 1})
    with run.checkpoint(1) as folder:
        (folder / "weights").write_text("1")
        assert forced == []
    assert forced == ["metrics.jsonl"]

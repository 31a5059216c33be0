"""Places that cannot be written to are refused before long work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import saobp
from saobp.cli import app
from saobp.runs.folder import RunError, RunFolder
from saobp.storage.locks import one_at_a_time
from saobp.storage.places import check_can_write
from saobp.testing.tiny_models import save_tiny_bert, tiny_model


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without permission to write, also for root."""
    folder = tmp_path / "locked"
    folder.mkdir()

    def allowed(path: Any, mode: int, **_: Any) -> bool:
        return not (mode & os.W_OK and Path(path).is_relative_to(folder))

    monkeypatch.setattr(os, "access", allowed)
    return folder


def test_a_place_is_looked_at_and_not_made(tmp_path: Path, locked: Path) -> None:
    (tmp_path / "file").touch()
    check_can_write(tmp_path / "new" / "er")
    check_can_write(Path("new"))
    for place, words in ((tmp_path / "file" / "x", "is a file"), (locked / "x" / "y", "lack of permission")):
        with pytest.raises(ValueError, match=f"{words}: name another folder|{words}, .*: name another"):
            check_can_write(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "locked"]


def test_a_parent_that_cannot_be_locked_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a /home that its users may enter and not list."""

    tried: list[Path] = []

    def unreadable(path: Path, _: int) -> int:
        tried.append(path)
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("saobp.storage.locks.os.open", unreadable)
        with one_at_a_time(tmp_path / "model"), one_at_a_time(tmp_path / "model"):  # neither waits
            (tmp_path / "written").write_text("by both")
    assert tried == [tmp_path.resolve()] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["written"]


def test_a_run_and_a_save_name_the_locked_folder(locked: Path) -> None:
    with pytest.raises(RunError, match=r"locked' cannot be written to, .* another folder for the run"):
        RunFolder(locked / "run").check_free()
    with pytest.raises(ValueError, match=r"locked' cannot be written to"):
        saobp.save(saobp.apply(tiny_model("bert"), "high:0.5"), locked / "model")


@pytest.mark.parametrize(
    ("command", "long_work"),
    [
        (["export", "{model}", "--out", "{locked}/model"], "saobp.export.token_model.load_token_model"),
        (
            ["diagnose", "{model}", "--text", "{text}", "--out", "{locked}"],
            "saobp.metrics.diagnosis.loading.load_model",
        ),
        (["report", "{run}", "--out", "{locked}/page.html"], "saobp.report.write_report"),
        (["quickstart", "--out", "{locked}/quick"], "saobp.quickstart.prose.read_prose"),
    ],
)
def test_commands_refuse_a_locked_folder_before_the_work(
    command: list[str], long_work: str, locked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("some words\n")
    run.mkdir()
    (run / "recipe.json").write_text('{"kind": "pretrain"}')
    known = {"model": save_tiny_bert(tmp_path / "bert"), "text": text, "run": run, "locked": locked}
    monkeypatch.setattr(long_work, lambda *_, **__: pytest.fail("the work was begun"))
    answer = CliRunner().invoke(app, [word.format(**known) for word in command])
    assert answer.exit_code == 1, answer.output
    assert "cannot be written to, for lack of permission: name another" in " ".join(answer.output.split())

"""Results on stdout, all else on stderr; JSON; nothing replaced unasked; fast refusals."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import typer
from huggingface_hub import constants
from rich.console import Console
from typer.testing import CliRunner

from saobp import progress
from saobp.cli import app
from saobp.commands.streams import fail
from saobp.progress import OccasionalLines
from saobp.storage import model_folders
from saobp.storage.model_folders import checked_folder, hub_problem
from saobp.testing.fake_runs import make_run
from saobp.training.progress import once, plain_sentences


def test_a_diagnosis_as_json_is_all_that_stdout_holds(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["diagnose", "--example", "--json", "--out", str(tmp_path / "found")])
    assert said.exit_code == 0, said.output
    (found,) = json.loads(said.stdout)
    assert found["heads"][0]["verdict"] == "diffuse"
    assert "wrote diagnosis.json" in said.stderr


def test_a_reader_that_stops_reading_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """As in ``saobp diagnose ... --json | head``: typer ends the command without a word."""
    with pytest.raises(BrokenPipeError):
        fail(BrokenPipeError(32, "Broken pipe"))
    assert capsys.readouterr().err == ""


def test_an_error_of_the_system_is_shown_without_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        fail(OSError(errno.ENOSPC, "No space left on device"))  # of a write to stdout: no file is named
    assert "No space left on device" in (found := capsys.readouterr().err)
    assert "Errno" not in found


def test_a_missing_data_folder_is_named_with_its_option(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--data-dir", str(tmp_path / "nowhere")])
    assert refused.exit_code == 1
    assert refused.stderr.strip().endswith("nowhere does not exist: check --data-dir")


def test_a_page_is_never_replaced_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [str(make_run(tmp_path / name, steps=50)) for name in ("a", "b")]
    page = tmp_path / "report.html"
    page.write_text("mine")
    refused = CliRunner().invoke(app, ["report", *runs])
    assert refused.exit_code == 1
    assert "report.html is there" in refused.stderr
    assert page.read_text() == "mine"
    assert CliRunner().invoke(app, ["report", *runs, "--overwrite"]).stdout == "wrote report.html\n"
    assert page.read_text() != "mine"
    figures = ["report", runs[0], "--format", "svg"]
    assert CliRunner().invoke(app, figures).exit_code == 0
    assert "curves.svg is there" in CliRunner().invoke(app, figures).stderr
    assert CliRunner().invoke(app, [*figures, "--overwrite"]).exit_code == 0


def test_a_missing_text_or_model_is_noticed_before_torch_is_loaded() -> None:
    script = (
        "import sys; from saobp.cli import app\n"
        "for line in (['diagnose', 'x', '--text', 'nope.txt'], ['evaluate', 'nowhere']):\n"
        "    try: app(line)\n"
        "    except SystemExit as end: assert end.code == 1\n"
        "assert 'torch' not in sys.modules"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "there is no file 'nope.txt'" in said.stderr
    assert "there is no model folder 'nowhere'" in said.stderr


def test_the_disk_is_looked_at_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/high/model").mkdir(parents=True)
    Path("runs/high/model/config.json").write_text("{}")
    assert checked_folder("runs/high") == "runs/high/model"
    with pytest.raises(FileNotFoundError, match=r"did you mean 'runs/high'.*switched off here"):
        checked_folder("runs/hihg")
    with pytest.raises(FileNotFoundError, match="did you mean 'runs/high/model'"):
        checked_folder("runs/hihg/model")


def test_a_hub_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/config.json"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda *_: address)
        monkeypatch.setattr(model_folders, "HUB_SECONDS", 0.3)
        start = time.monotonic()
        problem = hub_problem("a-name-that-nobody-has")
        assert time.monotonic() - start < 5
    assert problem is not None
    assert "could not be asked within 0.3 seconds" in problem
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)
    assert hub_problem("a-name-that-nobody-has") is None, "a failure to ask is no answer"


def test_piped_lines_come_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    say = OccasionalLines(Console(stderr=True))
    for now in (1.0, 59.0, 60.5, 61.0, 100.0, 121.0):
        say(f"at {now}")
    assert capsys.readouterr().err.split("\n") == ["at 60.5", "at 121.0", ""]


def test_a_warning_is_said_once() -> None:
    import warnings

    said: list[str] = []
    with warnings.catch_warnings(), plain_sentences(once(said.append)):
        warnings.simplefilter("always")
        for _ in range(6):
            warnings.warn("it leaks", UserWarning, stacklevel=1)
    assert said == ["Note: it leaks"]

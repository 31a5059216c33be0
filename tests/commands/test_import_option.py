"""``--import`` and entry points: a factor of one's own on the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from saobp.cli import app
from saobp.refinement import Refinement
from saobp.runs.folder import RunFolder
from saobp.testing.tiny_training import prose

FACTOR = """
import saobp

class Echo(saobp.Factor):
    def log_messages(self, beliefs, strength):
        return -strength * beliefs

saobp.register_factor("{name}", Echo())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    return tmp_path


def test_a_model_is_trained_and_diagnosed_with_a_factor_of_a_file(folder: Path) -> None:
    (folder / "prose.txt").write_text(prose())
    (folder / "echo_factor.py").write_text(FACTOR.format(name="echo-of-a-file"))
    own = ["--import", "echo_factor.py"]
    line = "pretrain --recipe tiny --steps 2 --set batch_size=4 --set length=16 --corpus prose.txt"
    line += " --vocabulary 60 --refinement echo-of-a-file:0.5 --out run"
    assert "unknown factor" in CliRunner().invoke(app, line.split()).stderr
    done = CliRunner().invoke(app, [*line.split(), *own])
    assert done.exit_code == 0, done.output
    assert RunFolder(folder / "run").recipe["refinement"]["factor"] == "echo-of-a-file"
    done = CliRunner().invoke(app, ["diagnose", "run", "--text", "prose.txt", "--limit", "2", *own])
    assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_imported_is_one_sentence() -> None:
    Path("broken.py").write_text("1 / 0\n")
    for name, words in {
        "nope.py": "there is no file 'nope.py'",
        "no_such_module_here": "No module named",
        "broken.py": "--import broken.py failed: ZeroDivisionError",
    }.items():
        said = CliRunner().invoke(app, ["quickstart", "--import", name])
        assert said.exit_code == 1
        assert words in said.stderr
        assert len(said.stderr.splitlines()) == 1


def test_an_installed_package_names_its_factor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "installed_echo.py").write_text(FACTOR.format(name="installed-echo"))
    info = folder / "echo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[saobp.factors]\ninstalled-echo = installed_echo\n")
    with pytest.raises(ValueError, match="unknown factor"):
        Refinement.parse("installed-echo:0.5")
    monkeypatch.syspath_prepend(str(folder))
    assert Refinement.parse("installed-echo:0.5").strength == 0.5

"""Commands without options introduce themselves; with some, they say which one is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from saobp.cli import app


@pytest.mark.parametrize(
    ("command", "options", "missing"),
    [
        ("pretrain", ["--corpus", "books.txt"], "name a folder for the run by --out"),
        ("reproduce", ["--scale", "mini"], "name a target, such as gtd or all"),
    ],
)
def test_only_a_bare_command_introduces_itself(command: str, options: list[str], missing: str) -> None:
    bare = CliRunner().invoke(app, [command])
    assert bare.exit_code == 0
    assert f"saobp {command} " in bare.output
    incomplete = CliRunner().invoke(app, [command, *options])
    assert incomplete.exit_code == 1
    assert incomplete.stderr.startswith(missing)
    assert not incomplete.stdout


def test_a_report_needs_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert refused.exit_code == 1
    assert refused.stderr == f"'{tmp_path}' holds no run and no diagnosis\n"
    assert not (tmp_path / "report.html").exists()

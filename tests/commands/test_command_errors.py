"""Every command refuses in one sentence on stderr, with exit code 1 and nothing on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from saobp.cli import app


@pytest.mark.parametrize(
    "line",
    [
        ["report", "{missing}"],
        ["explore", "{missing}", "--no-browser"],
        ["diagnose", "{missing}", "--text", "{text}"],
        ["diagnose", "--example", "--text", "{missing}"],
        ["tokenize", "{missing}", "--out", "{missing}/tokens"],
        ["pretrain", "--corpus", "{missing}", "--out", "{missing}/run"],
        ["finetune", "--model", "{missing}", "--task", "rte"],
        ["evaluate", "{missing}"],
        ["export", "{missing}", "--to", "exported", "--out", "{missing}/new"],
        ["reproduce", "nothing"],
        ["quickstart", "--refinement", "none"],
    ],
    ids=lambda line: " ".join(line[:2]),
)
def test_errors_go_to_stderr(tmp_path: Path, line: list[str]) -> None:
    (tmp_path / "text.txt").write_text("A few words.")
    given = {"missing": tmp_path / "missing", "text": tmp_path / "text.txt"}
    said = CliRunner().invoke(app, [part.format(**given) for part in line])
    assert said.exit_code == 1, said.output
    assert said.stdout == ""
    assert 0 < len(said.stderr.strip().splitlines()) <= 2
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize(
    ("line", "function"),
    [
        (["diagnose", "--example"], "saobp.metrics.diagnosis.loading.load_model"),
        (["explore", "--example"], "saobp.metrics.diagnosis.loading.load_model"),
        (["tokenize", "prose"], "saobp.data.parse_mixture"),
        (["pretrain", "--corpus", "prose", "--dry-run"], "saobp.training.recipes.named_recipe"),
        (["export", "."], "saobp.export.folder.check_request"),
        (["reproduce", "gtd"], "saobp.lab.get_scale"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_errors_of_the_program_keep_their_traceback(
    line: list[str], function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slip(*_: Any, **__: Any) -> NoReturn:
        raise TypeError("a slip of the program")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(function, slip)
    assert isinstance(CliRunner().invoke(app, line).exception, TypeError)

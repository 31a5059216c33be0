"""A machine without plotly: everything but the page works, and one sentence says what is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab.session import Session
from saobp.report.page_assets import MissingPlotlyError, plotly_library
from saobp.testing.fake_runs import make_run

SAID = "the page needs plotly, which is not installed here"


@pytest.fixture(autouse=True)
def no_plotly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    plotly_library.cache_clear()
    yield
    plotly_library.cache_clear()


def test_a_report_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    for command in (["report", str(run)], ["explore", "--example", "--no-browser"]):
        refused = CliRunner().invoke(app, command)
        assert refused.exit_code == 1
        assert SAID in refused.output
    figures = CliRunner().invoke(app, ["report", str(run), "--format", "svg", "--out", str(tmp_path / "out")])
    assert figures.exit_code == 0, figures.output


def test_a_diagnosis_goes_on_without_its_page(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["diagnose", "--example", "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert SAID in shown.output
    assert (tmp_path / "diagnosis.json").is_file()
    assert not (tmp_path / "report.html").exists()


def test_a_reproduction_goes_on_without_its_page(tmp_path: Path) -> None:
    run, said = make_run(tmp_path / "run", steps=20), []
    work = SimpleNamespace(
        folders=SimpleNamespace(runs=tmp_path, out=tmp_path),
        plan=SimpleNamespace(
            pretrain_runs=lambda: [
                SimpleNamespace(folder=lambda _: run, method=SimpleNamespace(key="high"), family="bert")
            ],
            experiments=[],
            scale=SimpleNamespace(name="smoke"),
        ),
        notify=said.append,
    )
    Session._write_html(work)  # type: ignore[arg-type]
    assert said == [str(MissingPlotlyError())]

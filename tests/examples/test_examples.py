"""The scripts in examples/ run, at a few steps, and print what they promise."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("script", "arguments", "printed"),
    [
        ("train_with_trainer.py", ["--steps", "2"], ["strength_bias", "saved and loaded", "'learned'"]),
        ("own_model.py", ["--steps", "2"], ["step 0: loss", "strengths:"]),
        ("diagnose_saved_model.py", [], ["refined by high:1", "diffuse"]),
        ("new_factor.py", ["--steps", "2"], ["step 0: loss", "strengths:"]),
    ],
)
def test_example(
    script: str,
    arguments: list[str],
    printed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    out = capsys.readouterr().out
    for words in printed:
        assert words in out


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text("utf-8")
    there = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}} - {"texts.py"}
    assert {name for name in there if f"({name})" not in page} == set()

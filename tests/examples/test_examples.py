"""The scripts and notebooks in examples/ run, at a few steps, and give what they promise."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
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
    for _ in range(2):  # a second time in the same folder too
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    out = capsys.readouterr().out
    for words in printed:
        assert words in out


def run_notebook(name: str, **instead: str) -> dict[str, Any]:
    """The namespace after the code cells, in order, with some settings replaced. No outputs are stored."""
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / name).read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            code = "".join(cell["source"])
            for setting, value in instead.items():
                code = re.sub(rf"(?<=\b{setting} = ).*", value, code)
            exec(compile(code, name, "exec"), names)
    return names


@pytest.fixture
def in_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "")
    with matplotlib.rc_context({"backend": "agg"}):
        yield
    plt.close("all")


@pytest.mark.usefixtures("in_examples")
def test_notebook_by_hand() -> None:
    names = run_notebook("one_step_of_belief_propagation.ipynb")
    assert (names["refined"] - names["belief"]).abs().max() < 1e-12


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("in_examples")
def test_notebook_health_in_tensorboard() -> None:
    names = run_notebook("health_in_tensorboard.ipynb", STEPS="21", LIMIT="0.5")
    assert "max_logit" in names["alerts"][0].reason
    assert {"train/health/gtd", "train/health/layer_01/sink_mass", "train/watch/max_logit"} <= set(
        names["names"]
    )
    assert sum(point.value for point in names["events"].Scalars("train/watch/alerts")) == len(names["alerts"])


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text("utf-8")
    there = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}} - {"texts.py"}
    assert {name for name in there if f"({name})" not in page} == set()

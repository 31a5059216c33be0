"""What ``saobp diagnose`` says meanwhile: what is cut, how long it takes, how far it is; its table."""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from saobp.cli import app
from saobp.metrics.diagnosis.diagnose import diagnose
from saobp.metrics.diagnosis.loading import example_model
from saobp.report.diagnosis_page import write_diagnosis
from saobp.testing.tiny_models import tiny_model

CLOCK = "saobp.metrics.diagnosis.expected_time.monotonic"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)], env={"COLUMNS": "200"})


def test_what_is_cut_or_left_out_and_the_time_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=1000)
    monkeypatch.setattr(CLOCK, lambda: next(clock))
    model, texts = tmp_path / "model", tmp_path / "long.txt"
    tiny_model("bert").save_pretrained(model)
    example_model()[1].save_pretrained(model)
    texts.write_text("word " * 90 + "\n\nsome words\n\none")
    shown = run(model, "--text", texts, "--out", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert "1 of 3 texts is cut to 64 tokens, the most that" in shown.output
    assert "1 of 3 texts has fewer than two tokens and is left out" in shown.output
    assert "measuring 2 texts, 66 tokens: about" in shown.output
    (record,) = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert (record["texts"], record["tokens"]) == (2, 66)
    quiet = run(model, "--text", texts, "--length", 64, "--out", tmp_path / "quiet")
    assert quiet.exit_code == 0
    assert "cut to" not in quiet.output


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["word " * 64], "measuring 1 text, 64 tokens: about 40 s"),  # two layers of six are done
        (["word " * 64] * 2, "measuring 2 texts, 128 tokens: about 2 min"),
        (["word " * 64, "word " * 16], "measuring 2 texts, 80 tokens: about 48 s"),
    ],
)
def test_the_time_is_said_early_in_the_first_text(
    texts: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock each layer takes 10 s, and what comes before the first takes no time."""
    said: list[str] = []
    now = [0.0]
    monkeypatch.setattr(CLOCK, lambda: now[0])
    model = tiny_model("bert", num_hidden_layers=6)
    for layer in model.bert.encoder.layer:
        layer.attention.self.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 10))
    parts: list[float] = []

    def progress(more: float) -> None:
        parts.append(more)

    def note(sentence: str) -> None:
        said.append(f"{sum(parts):.2f} {sentence}")

    diagnose(model, example_model()[1], texts, statistics=["gtd"], progress=progress, note=note)
    assert said == [f"0.33 {words}"]
    assert sum(parts) == pytest.approx(len(texts))
    assert len(parts) >= 6
    assert min(parts) > 0


def test_short_work_is_not_announced() -> None:
    said: list[str] = []
    diagnose(tiny_model("gpt2"), example_model()[1], ["some words"], statistics=["gtd"], note=said.append)
    assert said == []


def test_a_table_has_the_columns_of_all_its_heads(tmp_path: Path) -> None:
    found = diagnose(tiny_model("bert"), example_model()[1], ["some words"], statistics=["gtd"])
    first, *others = found.heads
    write_diagnosis([replace(found, heads=(replace(first, kind=None, shares={}), *others))], tmp_path)
    rows = list(csv.DictReader((tmp_path / "heads.csv").open()))
    assert rows[0]["share_self"] == ""
    assert float(rows[1]["share_self"]) == others[0].shares["self"]

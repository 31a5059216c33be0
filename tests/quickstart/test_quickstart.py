"""The quickstart from end to end with a few steps of training, and its parts."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

from saobp.cli import app
from saobp.commands import quickstart
from saobp.quickstart import prose, training

TEXTS = [
    "The basic import statement is executed in two steps, and names are bound in the local namespace. "
    "The garden was quiet and the old door stood open.",
    "A clause consists of a header and a suite. Each header begins with a keyword and ends with a colon.",
    "It is often useful to know the names of all the words in a short text before the next one is read.",
] * 150


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "read_prose", lambda progress: progress(1.0) or TEXTS)


def run(out: Path, **options: object) -> tuple[Path, str]:
    console = Console(file=io.StringIO(), width=100)
    settings: dict = {"refinement": "high:1", "sentence": None, "steps": 3, "seconds": 60.0} | options
    page = quickstart.run(console, out=out, **settings)
    return page, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("few_texts")
def test_runs_twice_and_leaves_complete_files(tmp_path: Path) -> None:
    out = tmp_path / "quickstart"
    for _ in range(2):
        page, printed = run(out)
        (out / "mine.txt").touch()
    names = {entry.name for entry in out.iterdir()}
    assert names == {"index.html", "maps.png", "heads.png", "held_out.txt", "model", "mine.txt"}
    assert "attention entropy" in printed
    html = page.read_text("utf-8")
    assert html.count("data:image/png;base64,") == 2
    assert not re.search(r"(src|href)=\"(?!data:)", html)
    assert AutoModelForMaskedLM.from_pretrained(out / "model").config.model_type == "modernbert"
    assert AutoTokenizer.from_pretrained(out / "model")("a header")["input_ids"][0] == training.START


@pytest.mark.usefixtures("few_texts")
def test_own_sentence_is_drawn_as_text(tmp_path: Path) -> None:
    page, printed = run(tmp_path, sentence="A <b>suite</b> of $words$ [red].")
    assert "[red]" in printed
    assert "&lt;b&gt;suite&lt;/b&gt; of $words$" in page.read_text("utf-8")


@pytest.mark.usefixtures("few_texts")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--refinement", "hihg:1"], "unknown factor 'hihg'"),
        (["--refinement", "high:learned"], "give a strength"),
        (["--sentence", "word " * 40], "but this model takes 32"),
        (["--sentence", " "], "holds no word"),
        (["--refinement", "high:1/2"], "lists 2 layers"),
    ],
)
def test_bad_input_gets_a_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "STEPS", 1)
    result = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 1
    assert sentence in result.output
    assert not (tmp_path / "out").exists()


def test_training_lowers_the_loss_and_stops_at_its_time() -> None:
    tokenizer = training.train_tokenizer(TEXTS)
    lines = training.pack(tokenizer, TEXTS)
    assert lines.shape[1] == training.LENGTH
    assert (lines[:, 0] == training.START).all()
    model = training.new_model()
    before = training.held_out_loss(model, lines[:20])
    assert training.train(model, lines, steps=30, seconds=60) == 30
    assert training.held_out_loss(model, lines[:20]) < before - 1
    assert training.train(model, lines, steps=10**6, seconds=0.2) < 1000


def test_masking_asks_for_what_it_hides() -> None:
    lines = torch.randint(training.MASK + 1, 50, (8, 32))
    lines[:, 0] = training.START
    batch = training.masked(lines, torch.Generator().manual_seed(0))
    hidden = batch["input_ids"] == training.MASK
    assert hidden.any()
    assert not hidden[:, 0].any()
    assert batch["labels"][hidden].equal(lines[hidden])
    assert (batch["labels"][~hidden] == training.IGNORED).all()


def test_prose_is_read_from_python_itself() -> None:
    sentences = " ".join(["A sentence with words."] * 5)
    blocks = ["Short.", sentences.replace(". ", ".\n"), "   indented " + "word " * 30, "a ::= b " * 20]
    assert list(prose.paragraphs("\n\n".join(blocks))) == [sentences]
    assert any(prose.docstrings(Path(prose.__file__)))

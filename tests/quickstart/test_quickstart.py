"""The quickstart from end to end with a few steps of training, and its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from saobp.cli import app
from saobp.commands import quickstart
from saobp.metrics.diagnosis.loading import load_model
from saobp.quickstart import pipeline, prose
from saobp.report import MissingPlotlyError

TEXTS = [
    f"The basic import statement number {place} is executed in two steps, and names are bound in the local "
    f"namespace. The garden was quiet and the old door stood open for {place} days."
    for place in range(100)
] + [
    f"A clause of {place} words consists of a header and a suite. Each header begins with a keyword."
    for place in range(100)
]


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "read_prose", lambda progress: progress(1, 1) or TEXTS)
    monkeypatch.setattr(pipeline, "VOCABULARY", 150)
    monkeypatch.setattr(pipeline, "FEWEST_STEPS", 2)
    monkeypatch.setattr(pipeline, "TRIAL_SECONDS", 0.0)


def run(out: Path, **options: object) -> Path:
    settings: dict = {"refinement": "high:1", "sentence": None, "steps": 2, "seconds": 60.0} | options
    return quickstart.run(out=out, **settings)


@pytest.mark.usefixtures("few_texts")
def test_runs_twice_and_leaves_complete_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quickstart"
    for _ in range(2):
        page = run(out)
        (out / "mine.txt").touch()
    assert {entry.name for entry in tmp_path.iterdir()} == {"quickstart"}
    names = {entry.name for entry in out.iterdir()}
    assert names == {"index.html", "text", "held_out.txt", "plain", "high", "mine.txt"}
    printed = capsys.readouterr().out
    assert "held-out perplexity" in printed
    assert "localised" in printed or "healthy" in printed
    recipes = [json.loads((out / name / "recipe.json").read_text()) for name in ("plain", "high")]
    differing = {field for field in recipes[0] if recipes[0][field] != recipes[1][field]}
    assert differing == {"refinement"}
    html = page.read_text("utf-8")
    assert "trained plain and with high:1" in html
    assert '"run":"high"' in html
    assert "default-src" in html
    plain, refined = (load_model(str(out / name / "model"))[0] for name in ("plain", "high"))
    assert (hasattr(plain.config, "saobp"), refined.config.saobp["strength"]) == (False, 1.0)
    tokens = AutoTokenizer.from_pretrained(out / "high" / "model")("a header")["input_ids"]
    assert tokens[0] == 2


@pytest.mark.usefixtures("few_texts")
def test_own_sentence_and_learned_strengths(tmp_path: Path) -> None:
    page = run(tmp_path / "out", sentence="A <b>suite</b> of $words$.", refinement="high:learned")
    html = page.read_text("utf-8")
    assert "A &lt;b&gt;suite&lt;/b&gt; of $words$." in html
    assert "A \\u003cb\\u003esuite\\u003c/b\\u003e of $words$." in html


@pytest.mark.usefixtures("few_texts")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--refinement", "hihg:1"], "unknown factor 'hihg'"),
        (["--refinement", "none"], "compares plain attention with a refinement"),
        (["--sentence", " "], "holds no word"),
        (["--refinement", "high:1/2/3/4/5"], "lists 5 layers"),
    ],
)
def test_bad_input_gets_a_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "STEPS", 2)
    result = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 1
    assert sentence in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("few_texts")
def test_folders_of_others_are_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "text" / "thesis.tex"
    mine.parent.mkdir()
    mine.touch()
    with pytest.raises(ValueError, match="text is there and of no quickstart: name another folder by --out"):
        run(tmp_path)
    with pytest.raises(ValueError, match=r"thesis\.tex' is a file: name another folder by --out"):
        run(mine)
    assert mine.exists()


@pytest.mark.usefixtures("few_texts")
def test_a_slow_machine_takes_fewer_steps(tmp_path: Path) -> None:
    recipe = pipeline.recipe_of(1000)
    texts = pipeline.prepare(TEXTS, tmp_path / "text", recipe.length, lambda *_: None)
    assert pipeline.fitting_steps(recipe, texts, seconds=1e9) == 1000
    assert pipeline.fitting_steps(recipe, texts, seconds=1e-9) == pipeline.FEWEST_STEPS
    assert set(texts.held_out) < set(TEXTS)
    assert 5 <= len(texts.held_out) <= 20


def test_prose_is_read_from_python_itself() -> None:
    sentences = " ".join(["A sentence with words."] * 5)
    code = "   if x == 1: y[0] = f(x, 'a=%s' % 2) + {'b': [1, 2, 3]}"
    blocks = ["Short.", "  " + sentences.replace(". ", ".\n  "), code, "a ::= b " * 20, ">>> " + sentences]
    assert list(prose.paragraphs("\n\n".join(blocks))) == [sentences]
    assert any(prose.docstrings(Path(prose.__file__)))
    assert (len.__doc__ or "") in prose.compiled_docstrings()
    assert (str.split.__doc__ or "") in prose.compiled_docstrings()


@pytest.mark.usefixtures("few_texts")
def test_without_plotly_there_are_runs_but_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> None:
        raise MissingPlotlyError

    monkeypatch.setattr(pipeline, "write_page", missing)
    assert run(tmp_path / "out") is None
    assert "the page needs plotly" in capsys.readouterr().err
    assert (tmp_path / "out" / "high" / "model").is_dir()

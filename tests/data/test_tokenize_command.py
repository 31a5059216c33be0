"""``saobp tokenize`` and the benchmark of tokenising, on a few sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from saobp.benchmarking.tokenise import tokenise_speed
from saobp.cli import app
from saobp.data import TokenStore, load_tokenizer, train_vocabulary

TEXT = "The fox sees a lazy dog, and runs. " * 40


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(TEXT + name)
    return tmp_path


def test_corpora_are_tokenised_and_told(data_dir: Path, tmp_path: Path) -> None:
    arguments = ["tokenize", "one,two", "--tokenizer", "train:60", "--data-dir", str(data_dir)]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "two: 1 documents" in done.output
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer-60")
    stores = [TokenStore.open(folder) for folder in sorted((tmp_path / "out").glob("[!.]*-????????"))]
    assert [store.description.corpus for store in stores] == ["one", "two"]
    stores[0].check_tokenizer(tokenizer)


def test_a_mistake_is_one_sentence(data_dir: Path, tmp_path: Path) -> None:
    for wrong in (["one", "--tokenizer", "train:many"], ["one:-1"], ["one", "--tokenizer", str(tmp_path)]):
        arguments = ["tokenize", *wrong, "--data-dir", str(data_dir), "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1
        assert len(done.output.strip().splitlines()) == 1


def test_the_benchmark_measures_both_ways(data_dir: Path, tmp_path: Path) -> None:
    train_vocabulary([TEXT], 60).save_pretrained(tmp_path / "vocabulary")
    table = tokenise_speed(
        data_dir, corpora=["one"], tokenizers=[str(tmp_path / "vocabulary")], turns=1, say=lambda _: None
    )
    assert [row["way"] for row in table.rows] == ["datasets.map", "saobp"]
    assert all(isinstance(row["processor s"], float) for row in table.rows)

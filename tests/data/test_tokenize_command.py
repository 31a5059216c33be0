"""``saobp tokenize`` and the benchmark of tokenising, on a few sentences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from saobp.cli import app
from saobp.commands.tokenize import obtain_tokenizer
from saobp.data import TokenStore, load_tokenizer, prepare_corpora, train_vocabulary, word_encoder
from saobp.testing.scripts import load_script
from saobp.testing.tiny_training import prose

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
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer-bert-60")
    stores = [TokenStore.open(folder) for folder in sorted((tmp_path / "out").glob("[!.]*-????????"))]
    assert [store.metadata.corpus for store in stores] == ["one", "two"]
    stores[0].check_tokenizer(tokenizer)


def test_a_tokenising_process_that_dies_is_one_sentence(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "dies.py"
    program.write_text("import pickle, sys; pickle.load(sys.stdin.buffer); sys.exit(3)")
    monkeypatch.setattr(word_encoder, "__file__", str(program))
    arguments = [
        "tokenize",
        "one",
        "--tokenizer",
        "train:60",
        "--data-dir",
        str(data_dir),
        "--processes",
        "2",
    ]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "a tokenising process ended early (exit code 3)" in " ".join(done.output.split())
    assert not list((tmp_path / "out").glob("one-*"))


def test_a_data_folder_that_is_not_there_is_named_before_the_hub_is_asked(tmp_path: Path) -> None:
    arguments = ["tokenize", "one", "--data-dir", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert done.exit_code == 1
    assert done.output.strip().endswith("nowhere does not exist: check --data-dir")


def test_training_takes_up_the_vocabulary_that_was_learned(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name in the folder, under either spelling, and for a family that has BERT's words."""
    monkeypatch.chdir(tmp_path)
    (data_dir / "one" / "text.txt").write_text(prose())
    asked = ["--tokenizer", "train:60", "--data-dir", str(data_dir)]
    assert CliRunner().invoke(app, ["tokenize", "one", *asked]).exit_code == 0
    there = sorted(path.name for path in Path("tokens").iterdir())
    for out, family, words in (
        ("a", "bert", asked),
        ("b", "bert", ["--vocabulary", "60", "--data-dir", str(data_dir)]),
        ("c", "modernbert", ["--vocabulary", "60"]),  # from the tokens alone
    ):
        arguments = ["--corpus", "one", "--family", family, "--recipe", "tiny", "--steps", "2", "--out", out]
        done = CliRunner().invoke(app, ["pretrain", *arguments, "--held-out", "0.1", *words])
        assert done.exit_code == 0, done.output
    assert sorted(path.name for path in Path("tokens").iterdir()) == there
    other = CliRunner().invoke(app, ["tokenize", "two", *asked])
    assert other.exit_code == 1
    assert "tokenizer-bert-60 was learned from other texts than two" in other.output


def test_progress_is_shown_for_the_vocabulary_and_the_tokens(data_dir: Path, tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    def bar_of(words: str) -> Callable[[int, int], None]:
        seen = told.setdefault(words, [])
        return lambda done, total: seen.append((done, total))

    learned = obtain_tokenizer("train:60", ["one"], tmp_path / "out", data_dir, bar_of)
    prepare_corpora(["one"], learned, tmp_path / "out", data_dir=data_dir, progress=bar_of)
    assert list(told) == ["learning a vocabulary of 60", "tokenising one"]
    assert all(seen[-1][0] == seen[-1][1] > 0 for seen in told.values())


def test_a_mistake_is_one_sentence(data_dir: Path, tmp_path: Path) -> None:
    for wrong in (["one", "--tokenizer", "train:many"], ["one:-1"], ["one", "--tokenizer", str(tmp_path)]):
        arguments = ["tokenize", *wrong, "--data-dir", str(data_dir), "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1
        assert len(done.output.strip().splitlines()) == 1


def test_the_benchmark_measures_every_way(data_dir: Path, tmp_path: Path) -> None:
    train_vocabulary([TEXT], 60).save_pretrained(tmp_path / "vocabulary")
    table = load_script("benchmarks/tokenise.py").tokenise_speed(
        data_dir, corpora=["one"], tokenizers=[str(tmp_path / "vocabulary")], turns=1, notify=lambda _: None
    )
    assert [row["way"] for row in table.rows] == ["datasets.map", "encode_batch_fast", "saobp"]
    assert all(isinstance(row["processor s"], float) for row in table.rows)

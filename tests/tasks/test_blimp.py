"""BLiMP: likelihoods of sentences against slow computations and lm-evaluation-harness, ties, paired items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from typer.testing import CliRunner

import saobp
from saobp.cli import app
from saobp.data.tasks.checks import WrongRowsError
from saobp.training.checkpoints import load_tokenizer_of
from saobp.training.evaluation.blimp import (
    accuracies,
    difference,
    judge_pairs,
    pseudo_log_likelihoods,
    read_blimp,
    read_items,
)
from saobp.training.evaluation.harness import harness_accuracy, has_harness

PAIRS = [
    ("The cats walk near the river.", "The cats walks near the river.", "syntax", "agreement"),
    ("The dog sleeps.", "The dog sleep.", "syntax", "agreement"),
    ("A stone is old.", "A stone is old.", "syntax/semantics", "tie"),
    (
        "Who did the man see near the house?",
        "Who did the man see the dog near the house?",
        "syntax",
        "island",
    ),
    ("The young men ran and then slept.", "The young man run and then slept.", "morphology", "number"),
]


@pytest.fixture(scope="module")
def pairs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "blimp").mkdir()
    names = ("sentence_good", "sentence_bad", "field", "UID")
    columns = {name: list(values) for name, values in zip(names, zip(*PAIRS, strict=True), strict=True)}
    pq.write_table(pa.table({**columns, "pairID": range(len(PAIRS))}), folder / "blimp" / "test.parquet")
    return folder


def items(good: list[float], bad: list[float]) -> pa.Table:
    count = len(good)
    names = {"UID": ["one"] * count, "field": ["a", "b"] * (count // 2), "pairID": range(count)}
    return pa.table({**names, "good": good, "bad": bad})


@torch.no_grad()
def test_a_decoder_gives_the_likelihood_of_whole_sentences(gpt2: Path, pairs_dir: Path) -> None:
    model, tokenizer = saobp.load(gpt2, AutoModelForCausalLM).eval(), load_tokenizer_of(gpt2)
    found = judge_pairs(model, tokenizer, read_blimp(pairs_dir), is_decoder=True)
    for good, (sentence, *_) in zip(found["good"].to_pylist(), PAIRS, strict=True):
        ids = [tokenizer.bos_token_id or tokenizer.eos_token_id, *tokenizer(f" {sentence}")["input_ids"]]
        logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(float(logs[place, ids[place + 1]]) for place in range(len(ids) - 1))
        assert good == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_an_encoder_hides_each_token_alone(bert: Path, pairs_dir: Path) -> None:
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(bert).eval(), load_tokenizer_of(bert)
    sentences = [sentence for pair in PAIRS for sentence in pair[:2]]
    found = pseudo_log_likelihoods(model, tokenizer, sentences)
    for sentence, value in zip(sentences, found, strict=True):
        ids, expected = tokenizer(sentence)["input_ids"], 0.0
        for place, token in enumerate(ids):
            if token in tokenizer.all_special_ids:
                continue
            shown = torch.tensor([ids])
            shown[0, place] = tokenizer.mask_token_id
            expected += float(model(shown).logits[0, place].log_softmax(-1)[token])
        assert value == pytest.approx(expected, rel=1e-5)
    judged = judge_pairs(model, tokenizer, read_blimp(pairs_dir), is_decoder=False)
    np.testing.assert_allclose(judged["bad"].to_numpy(), found[1::2])


def test_a_tie_counts_half() -> None:
    found = accuracies(items([1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 5.0, 1.0]))
    assert found["accuracy"] == pytest.approx(62.5)
    assert found["ties"] == 1
    assert found["fields"] == {
        "a": {"accuracy": 50.0, "questions": 2},
        "b": {"accuracy": 75.0, "questions": 2},
    }


def test_models_are_compared_pair_by_pair() -> None:
    right, wrong = [1.0] * 10, [0.0] * 10
    base = items([1.0] * 5 + [0.0] * 5, [0.5] * 10)
    better = items([1.0] * 6 + [0.0] * 4, [0.5] * 10)
    found = difference(better, base)
    assert found["difference"] == pytest.approx(10.0)
    assert found["error"] == pytest.approx(100 * np.std([1.0] + [0.0] * 9, ddof=1) / 10**0.5)
    assert difference(items(right, wrong), items(right, wrong))["error"] == 0


@pytest.mark.skipif(not has_harness(), reason="lm-evaluation-harness (lm_eval) is not installed")
def test_the_harness_finds_the_same_number(gpt2: Path, pairs_dir: Path) -> None:
    model, tokenizer = saobp.load(gpt2, AutoModelForCausalLM).eval(), load_tokenizer_of(gpt2)
    split = read_blimp(pairs_dir)
    found = judge_pairs(model, tokenizer, split, is_decoder=True)
    ours = np.mean(found["good"].to_numpy() >= found["bad"].to_numpy())  # it counts a tie as right
    assert harness_accuracy(model, tokenizer, "blimp", split)["accuracy"] == pytest.approx(100 * ours)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_command_keeps_every_item(kind: str, pairs_dir: Path, tmp_path: Path, request: Any) -> None:
    model = str(request.getfixturevalue(kind))
    first, second = tmp_path / "first", tmp_path / "second"
    start = ["evaluate", model, "--tasks", "blimp", "--data-dir", str(pairs_dir)]
    done = CliRunner().invoke(app, [*start, "--out", str(first)])
    assert done.exit_code == 0, done.output
    assert "morphology" in done.output
    assert read_items(first).num_rows == len(PAIRS)
    result = json.loads((first / "result.json").read_text())["blimp"]
    assert result["questions"] == len(PAIRS)
    assert result["phenomena"]["tie"]["accuracy"] == result["fields"]["syntax_semantics"]["accuracy"] == 50
    again = CliRunner().invoke(app, [*start, "--out", str(second), "--against", str(first)])
    assert "+0.00 ± 0.00 % over 5 pairs in common" in again.output


@pytest.mark.parametrize(
    ("kind", "own"), [("bert", {"wikitext"}), ("gpt2", {"wikitext", "race-middle", "boolq"})]
)
def test_blimp_is_measured_only_where_it_is_named_or_all_tasks_are(
    kind: str, own: set[str], pairs_dir: Path, data_dir: Path, tmp_path: Path, request: Any
) -> None:
    for place in (*data_dir.iterdir(), pairs_dir / "blimp"):
        (tmp_path / place.name).symlink_to(place)
    line = ["evaluate", str(request.getfixturevalue(kind)), "--data-dir", str(tmp_path), "--json"]
    for asked, expected in (([], own), (["--tasks", "all"], own | {"blimp"})):
        done = CliRunner().invoke(app, [*line, "--positions", "10", "--limit", "2", *asked])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout).keys() - {"model", "decoder", "notes"} == expected


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"test\.parquet"):
        read_blimp(tmp_path)
    (tmp_path / "blimp").mkdir()
    pq.write_table(pa.table({"sentence_good": ["a"]}), tmp_path / "blimp" / "test.parquet")
    with pytest.raises(WrongRowsError, match="no column 'sentence_bad'"):
        read_blimp(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no blimp"):
        read_items(tmp_path)

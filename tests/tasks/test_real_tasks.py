"""One short real run of every task in one command, on a CPU with a tiny model."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import saobp
from saobp.cli import app
from saobp.data import load_tokenizer
from saobp.data.tasks import ALL, TASKS, load_task

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "SAOBP_DATA_DIR" not in os.environ, reason="SAOBP_DATA_DIR names no folder of real data"
    ),
]


@pytest.fixture(scope="module")
def real() -> Path:
    return Path(os.environ["SAOBP_DATA_DIR"])


@pytest.mark.parametrize("name", TASKS)
def test_the_real_files_pass_the_checks(name, real):
    task = load_task(name, real)
    assert task.partial == (name in ("qqp", "mnli", "qnli", "squad"))
    assert len(task.validation) > 70


def test_every_task_runs_in_one_command(real, tmp_path):
    tokenizer = load_tokenizer("bert", real)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes))
    saobp.apply(model, "high:0.2").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    line = [
        "finetune",
        "--task",
        "all",
        "--model",
        str(tmp_path / "model"),
        "--seeds",
        "42",
        "--limit",
        "512",
    ]
    line += ["--data-dir", str(real), "--out", str(tmp_path / "runs"), "--epochs", "1", "--length", "128"]
    answer = CliRunner().invoke(app, line, catch_exceptions=False)
    print(answer.output)
    assert answer.exit_code == 0
    for name in ALL:
        result = json.loads((tmp_path / "runs" / name / "result.json").read_text())
        assert list(result["seeds"]) == ["42"]
        assert result["partial"]


def test_a_decoder_is_measured_on_real_questions(real, tmp_path):
    tokenizer = load_tokenizer("gpt2", real)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=512)
    )
    saobp.apply(model, "high:0.2").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    line = [
        "evaluate",
        str(tmp_path / "model"),
        "--data-dir",
        str(real),
        "--limit",
        "8",
        "--out",
        str(tmp_path / "run"),
    ]
    answer = CliRunner().invoke(app, line, catch_exceptions=False)
    print(answer.output)
    assert answer.exit_code == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["wikitext"]["perplexity"] == pytest.approx(len(tokenizer), rel=0.2)

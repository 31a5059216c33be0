"""The model card: metadata that the hub reads, and what the text says."""

import json
import re

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

import saobp
from saobp.cli import app
from saobp.data.tasks import load_task
from saobp.lab.synthetic_tasks import write_tasks
from saobp.portable.run_summary import share_interval, summarise_run
from saobp.storage.manifest import check_manifest
from saobp.testing.tiny_models import save_tiny_bert, save_tiny_gpt2, tiny_model
from saobp.testing.tiny_training import small_recipe, train_small
from saobp.training.finetune import finetune

RECIPE = {"kind": "finetune", "task": "sst2", "model": "runs/high", "epochs": 3, "batch": 32, "rate": 1e-4}
RECORD = {
    "seed": 42,
    "command": "saobp finetune --task sst2",
    "data": {"train": "a" * 64},
    "environment": {"torch": "2.13.0", "hardware": "a GPU"},
}
RESULT = {"task": "sst2", "last_metrics": {"accuracy": 90.0, "f1": 89.0}, "rows": {"validation": 100}}


def card_in(folder):
    text = (folder / "README.md").read_text()
    return ModelCard(text).data, text


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize(("family", "pipeline"), [("bert", "fill-mask"), ("gpt2", "text-generation")])
def test_the_metadata_is_read_back_by_the_hubs_library(family, pipeline, portable, tmp_path):
    model = saobp.apply(tiny_model(family), "high:0.2")
    saobp.save(model, tmp_path / "model", portable=portable)
    data, text = card_in(tmp_path / "model")
    assert data.library_name == "transformers"
    assert data.pipeline_tag == pipeline
    assert ("custom_code" in data.tags) is portable
    assert ("trust_remote_code=True" in text) is portable
    assert ("does not load" in text) is not portable
    assert "| strength | 0.2, fixed" in text
    assert 'saobp.load("FOLDER", AutoModelFor' in text
    assert "`high:0.2`" in text


def test_a_card_tells_the_training_and_results_of_a_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name, content in {"recipe": RECIPE, "record": RECORD, "result": RESULT}.items():
        (run / f"{name}.json").write_text(json.dumps(content))
    model = saobp.apply(tiny_model("bert"), "high:learned")
    own = ("own test", 1.5, (1.25, 1.75), "ten texts")
    saobp.save(model, tmp_path / "model", portable=True, run=run, results=[own])
    _, text = card_in(tmp_path / "model")
    assert "| fine-tuned from | runs/high |" in text
    assert "| command | `saobp finetune --task sst2` |" in text
    assert "| sst2 accuracy | 90 | 82.56 to 94.48 | last epoch, 100 validation rows, one seed |" in text
    assert "| sst2 f1 | 89 | not known |" in text
    assert "| own test | 1.5 | 1.25 to 1.75 | ten texts |" in text
    assert "learned, one number per head" in text


@pytest.mark.parametrize(
    "results",
    [3, "ab", ("accuracy", 81.2), [("accuracy",)], [("a", "81")], [("a", 1, 2)], [("a", 81.2, (83, 82))]],
)
def test_results_that_no_card_can_show_are_refused(results, tmp_path):
    model = saobp.apply(tiny_model("bert"), "high:0.2")
    with pytest.raises(ValueError, match=r"a list of entries such as \('accuracy', 81.2, "):
        saobp.save(model, tmp_path / "model", results=results)
    with pytest.raises(TypeError, match=r"AutoTokenizer\.from_pretrained gives, not str"):
        saobp.save(model, tmp_path / "model", tokenizer="bert")
    assert list(tmp_path.iterdir()) == []


def test_the_interval_of_a_share_is_wilsons():
    """Compared with the values of Wilson's formula for 90 of 100 and for all of 10."""
    assert share_interval(90.0, 100) == pytest.approx((82.5634, 94.4772), abs=1e-3)
    assert share_interval(100.0, 10) == pytest.approx((72.2467, 100.0), abs=1e-3)
    assert summarise_run({}, {}, {}).results == ()


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    model = saobp.apply(tiny_model("bert"), "high:0.2")
    with pytest.raises(FileNotFoundError, match=r"not the folder of a finished run: it has no recipe\.json"):
        saobp.save(model, tmp_path / "model", run=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_trained_model_has_its_card_and_code_and_the_card_may_be_edited(tmp_path):
    train_small(
        small_recipe(refinement="high:learned", steps=2, warmup_steps=1), tmp_path / "run", portable=True
    )
    folder = tmp_path / "run" / "model"
    _, text = card_in(folder)
    assert "held-out perplexity" in text
    assert "one seed; the spread over seeds is not known" in text
    assert "modeling_saobp.BertForMaskedLM" in (folder / "config.json").read_text()
    (folder / "README.md").write_text("mine")
    check_manifest(folder)


def test_a_plain_model_is_not_made_portable(tmp_path):
    with pytest.raises(ValueError, match="loads anywhere as it is"):
        train_small(small_recipe(steps=2, warmup_steps=1), tmp_path / "run", portable=True)
    assert not (tmp_path / "run").exists()


def test_finetune_saves_a_portable_model_whose_card_has_intervals(tmp_path):
    data = write_tasks(tmp_path / "data")
    model = save_tiny_bert(tmp_path / "bert", "high:0.5")
    line = ["finetune", "--model", str(model), "--data-dir", str(data), "--task", "rte", "--limit", "8"]
    line += ["--epochs", "1", "--batch", "8", "--length", "64", "--out", str(tmp_path / "runs"), "--portable"]
    answer = CliRunner().invoke(app, line, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    folder = tmp_path / "runs" / "rte" / "seed-42" / "model"
    data, text = card_in(folder)
    assert data.pipeline_tag == "text-classification"
    assert re.search(
        r"\| rte accuracy \| [\d.]+ \| [\d.]+ to [\d.]+ \| last epoch, \d+ validation rows", text
    )
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
    assert type(loaded).__module__.endswith("modeling_saobp")
    plain = save_tiny_bert(tmp_path / "plain")
    line[2], line[-2] = str(plain), str(tmp_path / "none")
    answer = CliRunner().invoke(app, line)
    assert answer.exit_code == 1
    assert not (tmp_path / "none" / "rte" / "seed-42").exists()


@pytest.mark.filterwarnings("ignore:.*messages of later rows")
@pytest.mark.parametrize(
    ("task", "refinement", "words"),
    [
        ("rte", "high:0.5,future=paper", "must not travel"),
        ("race-middle", "high:0.5", "head for multiple choice"),
    ],
)
def test_finetune_refuses_a_model_that_cannot_travel_before_a_run_begins(task, refinement, words, tmp_path):
    task = load_task(task, write_tasks(tmp_path / "data"), limit=4)
    model = save_tiny_gpt2(tmp_path / "gpt2", refinement)
    with pytest.raises(ValueError, match=words):
        finetune(model, task, tmp_path / "run", seeds=[1], portable=True)
    assert not (tmp_path / "run").exists()

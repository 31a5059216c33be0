"""``saobp pretrain``: one sentence for every mistake, and token stores that are enough by themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import saobp
from saobp.cli import app
from saobp.runs.folder import RunFolder
from saobp.testing.tiny_training import prose, small_recipe, small_tokenizer, train_small
from saobp.training import trackers
from saobp.training.trainer import PretrainTrainer

QUICK = (
    "--recipe",
    "tiny",
    "--steps",
    "4",
    "--set",
    "batch_size=4",
    "--set",
    "length=16",
    "--held-out",
    "0.1",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    Path("prose.txt").write_text(prose())
    Path("more.txt").write_text(prose(seed=1))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["pretrain", *arguments])


def said(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.usefixtures("folder")
def test_text_to_model_and_again_from_tokens_alone() -> None:
    corpus = ("--corpus", "prose.txt:0.7,more.txt:0.3")
    first = run(*QUICK, *corpus, "--vocabulary", "60", "--refinement", "high:0.2", "--out", "runs/one")
    assert first.exit_code == 0, first.output
    assert "held-out perplexity" in said(first)
    one = RunFolder("runs/one")
    assert one.recipe["refinement"]["factor"] == "high"
    assert set(one.record["data"]) == {"prose.txt", "more.txt"}
    assert one.recipe["corpus"] == "prose.txt:0.7,more.txt:0.3"

    for text in Path().glob("*.txt"):
        text.unlink()
    shutil.move("tokens", "staged")
    second = run(
        *QUICK, *corpus, "--tokens", "staged", "--tokenizer", "staged/tokenizer-bert-60",
        "--refinement", "high:0.2", "--out", "runs/two",
    )  # fmt: skip
    assert second.exit_code == 0, second.output
    two = RunFolder("runs/two")
    assert two.result["loss"] == one.result["loss"]
    assert two.record["data"] == one.record["data"]

    for extra, code, sentence in (
        ((), 1, "is finished; its result is in"),
        (("--resume", "--refinement", "high:0.2"), 0, "finished already"),
        (("--resume", "--refinement", "low:0.2"), 1, "was started with another refinement"),
    ):
        again = run(*QUICK, *corpus, "--out", "runs/two", *extra)
        assert again.exit_code == code
        assert sentence in said(again)


def test_dry_run_prints_the_recipe(folder: Path) -> None:
    printed = run(
        "--dry-run", "--size", "small", "--refinement", "high:learned", "--set", "learning_rate=1e-4"
    )
    assert printed.exit_code == 0
    recipe = json.loads(printed.stdout)
    assert (recipe["name"], recipe["size"], recipe["learning_rate"]) == ("fast", "small", 1e-4)
    assert recipe["refinement"]["strength"] == "learned"
    assert sorted(path.name for path in folder.iterdir()) == ["more.txt", "prose.txt"]


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_refinement_that_the_model_cannot_take_is_refused_before_texts_are_read(
    options: list[str], folder: Path
) -> None:
    for refinement, sentence in (
        (("--family", "gpt2", "--refinement", "sinkhorn"), "Sinkhorn attention balances"),
        (("--size", "tiny", "--refinement", "high:0.1/0.2/0.3"), "lists 3 layers but there are 2"),
    ):
        result = run(
            *refinement, "--corpus", "prose.txt", "--vocabulary", "60", "--out", "runs/one", *options
        )
        assert result.exit_code == 1
        assert sentence in said(result)
    assert sorted(path.name for path in folder.iterdir()) == ["more.txt", "prose.txt"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tensorbord", "there is no tracker 'tensorbord' to report to: Trainer knows azure_ml, clearml,"),
        ("tensorboard,wandb", "the tracker 'wandb' is not installed"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_before_anything_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: ["tensorboard"])
    result = run(*QUICK, "--corpus", "prose.txt", "--vocabulary", "60", "--report-to", name, "--out", "run")
    assert result.exit_code == 1
    assert sentence in said(result)
    assert said(result).endswith("installed here: tensorboard")
    assert sorted(path.name for path in folder.iterdir()) == ["more.txt", "prose.txt"]
    with pytest.raises(ValueError, match=r"tracker 'wandb' is not installed"):
        train_small(small_recipe(), folder / "run", report_to="wandb")
    assert not (folder / "run").exists()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--size", "huge"), "unknown size 'huge'"),
        (("--recipe", "slow"), "unknown recipe 'slow'"),
        (("--refinement", "hihg"), "unknown factor 'hihg'"),
        (("--set", "speed=3"), "cannot set 'speed=3'"),
        (("--set", "seed=7"), "seed is not for --set: write --seed 7"),
        (("--set", "refinement=high"), "refinement is not for --set: write --refinement high"),
        (("--set", "family=gpt2"), "family is not for --set: write --family gpt2"),
        (("--set", "betas=1.9,0.3"), "betas must be two numbers from 0"),
        (("--set", "weight_decay=-1"), "weight_decay must be at least 0"),
        (("--seed", "-1"), "seed must be from 0"),
        (("--recipe", "modern", "--family", "llama", "--size", "micro"), "modern have no size 'micro'"),
        (("--corpus", "prose.txt", "--data-dir", "nowhere"), "the data folder nowhere does not exist"),
        (("--corpus", "novels"), "there is no text 'novels' and no token store of it in tokens"),
        ((), "tokens holds no token store: name texts by --corpus"),
        (("--corpus", "prose.txt", "--vocabulary", "60", "--tokenizer", "bert"), "not both"),
        (("--corpus", "prose.txt", "--vocabulary", "60", "--set", "batch_size=0"), "batch_size must be"),
    ],
)
def test_mistakes_get_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = run("--recipe", "tiny", *arguments, "--out", "run")
    assert result.exit_code == 1
    assert sentence in said(result)
    assert "Traceback" not in result.output
    assert not Path("run").exists()


@pytest.mark.usefixtures("folder")
def test_a_file_where_a_folder_is_needed_is_called_one() -> None:
    asked = (*QUICK, "--corpus", "prose.txt", "--vocabulary", "60")
    for option, sentence in (
        (("--tokens", "more.txt", "--out", "run"), "'more.txt' cannot be a folder: it is a file"),
        (("--out", "more.txt"), "'more.txt' is a file: name another folder for the run"),
    ):
        result = run(*asked, *option)
        assert result.exit_code == 1
        assert sentence in said(result)


def test_tokens_of_a_learned_vocabulary_ask_for_its_size(folder: Path) -> None:
    """Without this the family's own vocabulary would be asked of the hub."""
    assert run(*QUICK, "--corpus", "prose.txt", "--vocabulary", "60", "--out", "a").exit_code == 0
    (folder / "prose.txt").unlink()
    forgotten = run(*QUICK, "--corpus", "prose.txt", "--out", "b")
    assert forgotten.exit_code == 1
    assert "a vocabulary learned for bert: add --vocabulary 60" in said(forgotten)


def test_a_tokenizer_that_hides_nothing_is_refused_before_anything_is_written(folder: Path) -> None:
    small_tokenizer("gpt2").save_pretrained("words")
    result = run(*QUICK, "--corpus", "prose.txt", "--tokenizer", "words", "--out", "run")
    assert result.exit_code == 1
    assert "masked language modelling needs a tokenizer with a mask token" in said(result)
    assert sorted(path.name for path in folder.iterdir()) == ["more.txt", "prose.txt", "words"]


@pytest.mark.usefixtures("folder")
def test_resuming_where_no_run_is_says_so() -> None:
    result = run(*QUICK, "--corpus", "prose.txt", "--vocabulary", "60", "--out", "typo", "--resume")
    assert result.exit_code == 0, result.output
    assert "There is no run in typo yet, so a new one begins." in said(result)


@pytest.mark.usefixtures("folder")
def test_all_of_the_text_can_be_trained_on() -> None:
    result = run(*QUICK, "--corpus", "prose.txt", "--vocabulary", "60", "--held-out", "0", "--out", "run")
    assert result.exit_code == 0, result.output
    assert RunFolder("run").result["eval_loss"] is None
    assert not RunFolder("run").health()


@pytest.mark.usefixtures("folder")
def test_who_stops_a_run_is_told_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = ("--corpus", "prose.txt", "--vocabulary", "60", "--out", "run")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PretrainTrainer, "evaluate", stop)
        stopped = run(*QUICK, *corpus)
    assert stopped.exit_code != 0
    assert "The same command with --resume goes on with the run in run." in said(stopped)
    assert RunFolder("run").record["status"] == "interrupted"
    assert run(*QUICK, *corpus, "--resume").exit_code == 0


def test_without_arguments_it_explains_itself() -> None:
    assert "saobp pretrain --size mini" in run().output


def test_many_learners_of_one_tokenizer_mix_up_is_refused(folder: Path) -> None:
    assert run(*QUICK, "--corpus", "prose.txt", "--vocabulary", "60", "--out", "a").exit_code == 0
    (folder / "prose.txt").unlink()
    assert run(*QUICK, "--corpus", "more.txt", "--vocabulary", "80", "--out", "b").exit_code == 0
    mixed = run(*QUICK, "--corpus", "prose.txt", "--tokenizer", "tokens/tokenizer-bert-80", "--out", "c")
    assert mixed.exit_code == 1
    assert "come from another tokenizer" in said(mixed)


def test_a_vocabulary_is_not_taken_for_one_of_other_texts(folder: Path) -> None:
    assert run(*QUICK, "--corpus", "prose.txt", "--vocabulary", "60", "--out", "a").exit_code == 0
    assert run(*QUICK, "--corpus", "prose.txt", "--vocabulary", "60", "--out", "again").exit_code == 0
    other = run(*QUICK, "--corpus", "more.txt", "--vocabulary", "60", "--out", "b")
    assert other.exit_code == 1
    assert "tokens/tokenizer-bert-60 was learned from other texts than more.txt" in said(other)
    (folder / "prose.txt").write_text("The cat sleeps under the old house.\n\n" * 200)
    changed = run(*QUICK, "--corpus", "prose.txt", "--vocabulary", "60", "--out", "c")
    assert "other texts than prose.txt" in said(changed)
    meant = run(*QUICK, "--corpus", "prose.txt", "--tokenizer", "tokens/tokenizer-bert-60", "--out", "d")
    assert meant.exit_code == 0


def test_only_tokens_that_are_asked_for_are_verified(folder: Path) -> None:
    both = run(*QUICK, "--corpus", "prose.txt,more.txt", "--vocabulary", "60", "--out", "a")
    assert both.exit_code == 0, both.output
    for text in folder.glob("*.txt"):
        text.unlink()
    (damaged,) = (folder / "tokens").glob("more.txt-*/tokens.bin")
    damaged.write_bytes(bytes(damaged.stat().st_size))
    words = ("--tokenizer", "tokens/tokenizer-bert-60")
    other = run(*QUICK, "--corpus", "prose.txt", *words, "--out", "b")
    assert other.exit_code == 0, other.output
    for corpus in (("--corpus", "more.txt"), ()):
        refused = run(*QUICK, *corpus, *words, "--out", "c")
        assert refused.exit_code == 1
        assert "has changed since it was written" in said(refused)


def test_help_comes_before_pytorch_is_imported_and_the_library_all_the_same() -> None:
    """Public names are imported on first use, and Transformers knows the plug-in all the same."""
    program = """
import sys
import saobp
from saobp.cli import app
heavy = {"torch", "transformers", "numpy", "pandas"} & set(sys.modules)
assert not heavy, heavy
import saobp, saobp.functional
assert [getattr(saobp, name).__name__.removeprefix("saobp.") for name in saobp.__all__] == saobp.__all__
from transformers.modeling_utils import AttentionInterface
assert "saobp" in AttentionInterface.valid_keys(AttentionInterface())
assert not hasattr(saobp, "nothing")
"""
    source = str(Path(saobp.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_a_tokenizer_beside_the_tokens_is_taken_before_the_hub(folder: Path) -> None:
    small_tokenizer("bert").save_pretrained("tokens/tokenizer-bert")
    result = run(*QUICK, "--corpus", "prose.txt", "--tokenizer", "bert", "--out", "run")
    assert result.exit_code == 0, result.output
    saved = json.loads((folder / "run" / "model" / "tokenizer.json").read_text())
    assert saved["model"]["vocab"] == small_tokenizer("bert").get_vocab()

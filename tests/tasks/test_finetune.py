"""Fine-tuning end to end on every kind of task: seeds, best and last epoch, reuse, resume, refinements."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

import saobp
from saobp.cli import app
from saobp.data.tasks import ALL, load_task
from saobp.lab.synthetic_tasks import write_tasks
from saobp.runs.folder import RunError, RunFolder
from saobp.testing.tiny_models import save_tiny_bert
from saobp.training.checkpoints import checked_folder, load_tokenizer_of, load_with_head, model_checksum
from saobp.training.finetune import finetune, recipe_for
from saobp.training.finetune.run import encode_task, outcome
from saobp.training.finetune.trainer import TaskTrainer
from saobp.transformers import strength_parameters


def quick(name, **changes):
    return recipe_for(name, **{"epochs": 2, "batch": 8, "length": 64, **changes})


def test_all_tasks_in_one_command_and_one_of_each_kind_with_two_seeds(data_dir, bert, tmp_path):
    line = ["finetune", "--model", str(bert), "--data-dir", str(data_dir), "--out", str(tmp_path)]
    line += ["--epochs", "1", "--batch", "12", "--length", "64", "--no-keep-model"]
    twice = ("cola", "stsb", "squad", "hellaswag")
    assert {ALL[name].kind for name in twice} == {spec.kind for spec in ALL.values()}
    answer = CliRunner().invoke(app, [*line, "--task", "all"], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    more = CliRunner().invoke(
        app, [*line, "--task", ",".join(twice), "--seeds", "42,1"], catch_exceptions=False
    )
    assert "seed 42 is finished already" in " ".join(more.output.split())
    for name, spec in ALL.items():
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert result["task"] == name
        assert result["metric"] == spec.main_metric
        assert set(result["seeds"]) == ({"42", "1"} if name in twice else {"42"})
        values = [own["best"] for own in result["seeds"].values()]
        assert result["best"]["mean"] == pytest.approx(np.mean(values))
        assert result["best"]["std"] == (pytest.approx(np.std(values, ddof=1)) if name in twice else 0)
        for own in result["seeds"].values():
            assert set(own["best_metrics"]) == set(spec.metrics)
            assert -100 <= own["best"] <= 100
        assert result["partial"]
        run = RunFolder(tmp_path / name / "seed-42")
        assert run.is_finished
        assert run.record["status"] == "finished"
        assert not run.model.exists()
        assert run.recipe["kind"] == "finetune"
        assert f"eval_{spec.main_metric}" in run.metrics()[-1]
    assert "partial data" in answer.output


def test_a_task_that_can_be_learned_is_learned_and_the_model_kept(bert, tmp_path):
    data = write_tasks(tmp_path / "data", {"sst2": 96}, seed=3)
    task = load_task("sst2", data)
    recipe = quick("sst2", epochs=6, rate=5e-3, batch=16)
    result = finetune(bert, task, tmp_path / "run", seeds=[1], recipe=recipe)
    assert result["last"]["mean"] > 90
    assert result["best"]["mean"] >= result["last"]["mean"]
    assert result["last"]["std"] == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/seed-1/model")
    assert model.config.num_labels == 2


def test_spans_can_be_learned(tmp_path):
    data = write_tasks(tmp_path / "data", {"squad": 120}, seed=4)
    bert = save_tiny_bert(tmp_path / "bert", positions=128)
    recipe = quick("squad", epochs=8, rate=5e-3, batch=16, length=128)
    result = finetune(bert, load_task("squad", data), tmp_path / "run", seeds=[1], recipe=recipe)
    own = result["seeds"]["1"]["best_metrics"]
    assert own["exact_match"] > 25
    assert own["f1"] >= own["exact_match"]


def test_best_and_last_epoch_are_told_apart():
    lines = [
        {"step": 3, "loss": 1.0, "epoch": 0.5},
        {"step": 6, "eval_accuracy": 50.0, "eval_f1": 1.0, "epoch": 1.0},
        {"step": 12, "eval_accuracy": 80.0, "eval_f1": 2.0, "epoch": 2.0},
        {"step": 18, "eval_accuracy": 70.0, "eval_f1": 3.0, "epoch": 3.0},
    ]
    found = outcome(lines, "accuracy", ("accuracy", "f1"))
    assert (found["best"], found["last"], found["best_epoch"], found["epochs"]) == (80.0, 70.0, 2, 3)
    assert found["best_metrics"] == {"accuracy": 80.0, "f1": 2.0}
    assert found["last_metrics"] == {"accuracy": 70.0, "f1": 3.0}


def test_finished_seeds_are_taken_over_and_new_ones_added(data_dir, bert, tmp_path):
    task, recipe = load_task("mrpc", data_dir), quick("mrpc", epochs=1)
    first = finetune(bert, task, tmp_path, seeds=[1], recipe=recipe)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "seed-1").iterdir()}
    told = []
    second = finetune(bert, task, tmp_path, seeds=[1, 2], recipe=recipe, notify=told.append)
    assert told == ["mrpc: seed 1 is finished already and is taken over"]
    assert second["seeds"]["1"] == first["seeds"]["1"]
    assert set(second["seeds"]) == {"1", "2"}
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "seed-1").iterdir()}
    with pytest.raises(RunError, match="differs in rate: name another folder"):
        finetune(bert, task, tmp_path, seeds=[1], recipe=quick("mrpc", epochs=1, rate=1e-3))
    with pytest.raises(RunError, match="differs in rows"):
        finetune(bert, load_task("mrpc", data_dir, limit=9), tmp_path, seeds=[1], recipe=recipe)


def test_an_interrupted_seed_goes_on_and_gives_the_same_numbers(data_dir, bert, tmp_path, monkeypatch):
    task, recipe = load_task("cola", data_dir), quick("cola", epochs=3, rate=1e-3)
    options = {"seeds": [1, 2], "recipe": recipe, "checkpoint_seconds": 0.0}
    straight = finetune(bert, task, tmp_path / "straight", **options)

    evaluate, calls = TaskTrainer.evaluate, []

    def killed(self, *arguments, **more):
        calls.append(self.state.global_step)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return evaluate(self, *arguments, **more)

    monkeypatch.setattr(TaskTrainer, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune(bert, task, tmp_path / "broken", **options)
    run = RunFolder(tmp_path / "broken/seed-2")
    assert run.record["status"] == "interrupted"
    assert run.checkpoint_steps() == [3]
    assert not (tmp_path / "broken/result.json").exists()
    monkeypatch.undo()

    told = []
    resumed = finetune(bert, task, tmp_path / "broken", **options, notify=told.append)
    assert told == ["cola: seed 1 is finished already and is taken over", "cola: seed 2 goes on from step 3"]
    assert resumed == straight

    def numbers(folder):
        lines = RunFolder(tmp_path / folder / "seed-2").metrics()
        return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]

    assert numbers("broken") == numbers("straight")
    assert not run.checkpoints.exists()


def test_who_stops_the_command_is_told_how_to_go_on(data_dir, bert, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(TaskTrainer, "train", stop)
    line = ["finetune", "--model", str(bert), "--task", "cola", "--data-dir", str(data_dir)]
    answer = CliRunner().invoke(app, [*line, "--out", str(tmp_path)])
    assert answer.exit_code == 130
    assert "The same command goes on" in answer.stderr
    assert RunFolder(tmp_path / "cola/seed-42").record["status"] == "interrupted"


def test_no_logged_loss_spans_an_epochs_end(bert, tmp_path):
    data = write_tasks(tmp_path / "data", {"sst2": 200}, seed=3)
    task = load_task("sst2", data)
    finetune(bert, task, tmp_path / "run", seeds=[1], recipe=quick("sst2", epochs=2, batch=8))
    lines = RunFolder(tmp_path / "run/seed-1").metrics()
    logged = {line["step"] for line in lines if "loss" in line}
    ends = {line["step"] for line in lines if "eval_accuracy" in line}
    assert len(ends) == 2
    assert ends < logged


def test_lost_log_lines_do_not_change_the_result(data_dir, bert, tmp_path, monkeypatch):
    """What decides is in the checkpoint; the log is for people."""
    task, recipe = load_task("cola", data_dir), quick("cola", epochs=3, rate=1e-3)
    options = {"seeds": [1], "recipe": recipe, "checkpoint_seconds": 0.0}
    straight = finetune(bert, task, tmp_path / "straight", **options)
    checkpoint, made = TaskTrainer._save_checkpoint, []

    def killed(self, *arguments, **more):
        checkpoint(self, *arguments, **more)
        made.append(self.state.global_step)
        if len(made) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(TaskTrainer, "_save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune(bert, task, tmp_path / "broken", **options)
    monkeypatch.undo()
    log = tmp_path / "broken/seed-1/metrics.jsonl"
    assert "eval_" in log.read_text()
    log.write_text("")
    assert finetune(bert, task, tmp_path / "broken", **options) == straight


def test_checkpoints_of_a_finished_seed_are_cleaned_up(data_dir, bert, tmp_path):
    """Of one that was killed between its result and its clean-up."""
    options = {"seeds": [1], "recipe": quick("cola", epochs=1)}
    task = load_task("cola", data_dir)
    first = finetune(bert, task, tmp_path, **options)
    left = RunFolder(tmp_path / "seed-1").checkpoint_path(3)
    left.mkdir(parents=True)
    assert finetune(bert, task, tmp_path, **options) == first
    assert not left.parent.exists()


def test_a_broken_checkpoint_is_left_out_and_the_seed_starts_again(data_dir, bert, tmp_path, monkeypatch):
    task, recipe = load_task("cola", data_dir), quick("cola", epochs=2)
    options = {"seeds": [1], "recipe": recipe, "checkpoint_seconds": 0.0}
    straight = finetune(bert, task, tmp_path / "straight", **options)
    monkeypatch.setattr(RunFolder, "finish", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        finetune(bert, task, tmp_path / "broken", **options)
    monkeypatch.undo()
    run = RunFolder(tmp_path / "broken/seed-1")
    for step in run.checkpoint_steps():
        (run.checkpoint_path(step) / "model.safetensors").write_bytes(b"nothing")
    told = []
    assert finetune(bert, task, tmp_path / "broken", **options, notify=told.append) == straight
    assert "The checkpoint of step 6 is left out, because model.safetensors is not what was written." in told


def test_a_checkpoints_refinement_is_kept_changed_or_taken_off(data_dir, tmp_path):
    refined = save_tiny_bert(tmp_path / "bert", "high,strength=learned")
    task, recipe = load_task("rte", data_dir), quick("rte", epochs=1, rate=1e-2)
    finetune(refined, task, tmp_path / "own", seeds=[1], recipe=recipe)
    model = saobp.load(tmp_path / "own/seed-1/model", AutoModelForSequenceClassification)
    assert model.config.saobp["strength"] == "learned"
    assert all(bool(parameter.ne(0).any()) for parameter in strength_parameters(model))
    run = RunFolder(tmp_path / "own/seed-1")
    assert run.recipe["refinement"]["strength"] == "learned"
    (line,) = run.health()
    assert line["step"] == 3
    assert np.shape(line["statistics"]["gtd"]) == np.shape(line["strengths"]) == (2, 2)
    assert 0 <= np.min(line["statistics"]["gtd"]) <= np.max(line["statistics"]["gtd"]) <= 1

    finetune(refined, task, tmp_path / "other", seeds=[1], recipe=recipe, refinement="low:0.3")
    config = json.loads((tmp_path / "other/seed-1/model/config.json").read_text())
    assert (config["saobp"]["factor"], config["saobp"]["strength"]) == ("low", 0.3)

    finetune(refined, task, tmp_path / "plain", seeds=[1], recipe=recipe, refinement="none")
    assert RunFolder(tmp_path / "plain/seed-1").recipe["refinement"] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain/seed-1/model")


def test_a_decoder_is_fine_tuned_where_it_has_a_head(data_dir, gpt2, tmp_path):
    recipe = quick("mrpc", epochs=1)
    result = finetune(gpt2, load_task("mrpc", data_dir), tmp_path / "mrpc", seeds=[1], recipe=recipe)
    assert 0 <= result["last"]["mean"] <= 100
    recipe = quick("hellaswag", epochs=1)
    with pytest.raises(
        ValueError, match="hellaswag needs a head for multiple choice, which Transformers lacks for gpt2"
    ):
        finetune(gpt2, load_task("hellaswag", data_dir), tmp_path / "hellaswag", seeds=[1], recipe=recipe)


def test_long_recipes_are_cut_to_the_models_positions(data_dir, bert, tmp_path):
    told = []
    recipe = quick("wnli", epochs=1, length=128)
    finetune(bert, load_task("wnli", data_dir), tmp_path, seeds=[1], recipe=recipe, notify=told.append)
    assert told == ["wnli: sequences are cut to the model's 64 positions"]
    assert RunFolder(tmp_path / "seed-1").recipe["length"] == 64


def test_a_diverged_model_is_no_result(data_dir, bert, tmp_path, monkeypatch):
    def diverge(self, *_, **__):
        self.model.classifier.weight.data.fill_(torch.nan)

    monkeypatch.setattr("transformers.Trainer.log", diverge)
    with pytest.raises(ValueError, match="predictions are not finite"):
        finetune(bert, load_task("cola", data_dir), tmp_path, seeds=[1], recipe=quick("cola", epochs=1))
    assert not RunFolder(tmp_path / "seed-1").is_finished


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
        ({"rate": 0.0}, "rates must be above 0"),
        ({"warmup": 1.0}, "warmup is a share"),
        ({"length": 8}, "length must be at least 16"),
        ({"clip": 0.0}, "clip above 0"),
    ],
)
def test_recipes_are_checked(changes, words):
    with pytest.raises(ValueError, match=words):
        recipe_for("cola", **changes)


def test_mistakes_get_one_sentence(data_dir, bert, tmp_path):
    def said(*words):
        answer = CliRunner().invoke(app, ["finetune", "--out", str(tmp_path / "out"), *words])
        assert answer.exit_code == 1
        return answer.output

    known = ("--model", str(bert), "--data-dir", str(data_dir))
    for name in ("--task", "--tasks"):  # both, as for saobp evaluate
        assert "unknown task 'colla'" in said(name, "colla", *known)
    assert "seeds are whole numbers" in said("--task", "cola", "--seeds", "a", *known)
    assert "there is no model folder" in said(
        "--task", "cola", "--data-dir", str(data_dir), "--model", "no/such/model"
    )
    for wrong, sentence in (
        (("--data-dir", "no/data"), "the data folder no/data does not exist"),
        (("--refinement", "hihg"), "unknown factor 'hihg'"),
        (("--seeds", "42,-1"), "a seed must be a whole number from 0 to below 2**32, not -1"),
        (("--model", "no/such/model"), "there is no model folder"),
    ):
        assert said("--task", "all", *known, *wrong).count(sentence) == 1
    RunFolder(tmp_path / "run").model.mkdir(parents=True)
    assert "holds no model" in said(
        "--task", "cola", "--data-dir", str(data_dir), "--model", str(tmp_path / "run")
    )
    with pytest.raises(ValueError, match="the recipe is for cola, not for rte"):
        finetune(bert, load_task("rte", data_dir), tmp_path, recipe=quick("cola"))
    with pytest.raises(ValueError, match="there is no seed"):
        finetune(bert, load_task("rte", data_dir), tmp_path, seeds=[])
    with pytest.raises(ValueError, match=r"a seed must be a whole number .*, not 2\.5"):
        finetune(bert, load_task("rte", data_dir), tmp_path, seeds=[1, 2.5])


def test_the_folder_of_a_run_stands_for_its_model(bert, tmp_path):
    shutil.copytree(bert, tmp_path / "run" / "model")
    assert checked_folder(tmp_path / "run") == str(tmp_path / "run" / "model")
    assert model_checksum(tmp_path / "run") == model_checksum(bert)
    assert load_tokenizer_of(tmp_path / "run").get_vocab() == load_tokenizer_of(bert).get_vocab()


def test_a_model_that_is_nowhere_is_one_sentence():
    with pytest.raises(
        FileNotFoundError, match="no model folder 'runs/nothing', and the hub is switched off"
    ):
        load_tokenizer_of("runs/nothing")


def test_learned_strengths_have_a_group_of_their_own(data_dir, tmp_path):
    refined = save_tiny_bert(tmp_path / "bert", "high,strength=learned")
    task, recipe = load_task("rte", data_dir), quick("rte", strength_rate=7.0)
    tokenizer = load_tokenizer_of(refined)
    model = load_with_head(refined, task.spec, tokenizer)
    run = RunFolder.start(tmp_path / "run", "finetune", {}, seed=1)
    trainer = TaskTrainer(model, task.spec, recipe, encode_task(task, tokenizer, recipe), run, seed=1)
    groups = trainer.create_optimizer().param_groups
    assert {id(p) for p in groups[-1]["params"]} == {id(p) for p in strength_parameters(model)}
    assert groups[-1]["lr"] == pytest.approx(7.0 * recipe.rate)
    assert groups[-1]["weight_decay"] == 0
    everyone = [id(p) for group in groups for p in group["params"]]
    assert sorted(everyone) == sorted(id(p) for p in model.parameters())


def test_a_full_disk_costs_a_checkpoint_but_not_the_run(data_dir, bert, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    task, recipe = load_task("cola", data_dir), quick("cola", epochs=1)
    straight = finetune(bert, task, tmp_path / "straight", seeds=[1], recipe=recipe)
    monkeypatch.setattr("saobp.runs.folder.RunFolder.checkpoint", full)
    told = []
    options = {"seeds": [1], "recipe": recipe, "checkpoint_seconds": 0.0, "notify": told.append}
    assert finetune(bert, task, tmp_path / "full", **options) == straight
    assert told == ["The checkpoint of step 3 could not be written (no space left); the run goes on."]


def test_several_processes_are_refused(data_dir, bert, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process and one device"):
        finetune(bert, load_task("cola", data_dir), tmp_path)

"""The stages end to end at the smoke scale: runs are made once, resumed, measured and tabulated."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab import choose_experiments, get_scale, stages
from saobp.lab.experiment_plan import ExperimentPlan, check_same
from saobp.lab.measurements import take_measurement
from saobp.lab.session import LabFolders, Session
from saobp.lab.stages import DataSources, finetune_all, measure_all, pretrain_all
from saobp.lab.synthetic_tasks import write_synthetic_data
from saobp.runs.folder import RunError, RunFolder

SMOKE = get_scale("smoke")


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataSources]:
    root = tmp_path_factory.mktemp("lab")
    return root / "runs", DataSources(SMOKE, root / "tokens", write_synthetic_data(root / "data"))


@pytest.fixture(scope="module")
def trained(folders: tuple[Path, DataSources]) -> Path:
    """Two BERTs and two GPT-2s."""
    runs, sources = folders
    for target, only in (("gtd", "*-high-*"), ("gtd", "*-original-*"), ("decoder-leak", "*-future-paper-*")):
        models = ExperimentPlan(choose_experiments(target), SMOKE, 1, only).pretrain_runs()
        result = pretrain_all(models, runs, sources, quiet)
        assert len(result.done) == len(models) == 1
    return runs


def test_a_finished_run_is_reused(trained: Path, folders: tuple[Path, DataSources]) -> None:
    models = ExperimentPlan(choose_experiments("gtd"), SMOKE, 1, "*-high-*").pretrain_runs()
    before = (models[0].folder(trained) / "result.json").stat().st_mtime_ns
    result = pretrain_all(models, trained, folders[1], quiet)
    assert result.reused == ["bert-tiny-high-0.2-seed42"]
    assert not result.done
    assert (models[0].folder(trained) / "result.json").stat().st_mtime_ns == before


def test_a_finished_run_of_another_recipe_is_refused(trained: Path) -> None:
    run = RunFolder(trained / "bert-tiny-high-0.2-seed42")
    with pytest.raises(RunError, match="differs in refinement"):
        check_same(run, SMOKE.recipe_of("bert", "low", 42))


class InterruptAt(TrainerCallback):
    """Ctrl-C at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_from_its_checkpoint(
    folders: tuple[Path, DataSources], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends as the run that was never interrupted."""
    model = ExperimentPlan(choose_experiments("gtd"), SMOKE, 1, "*-low-*").pretrain_runs()[0]
    with monkeypatch.context() as patch:
        patch.setattr(stages, "pretrain", functools.partial(stages.pretrain, callbacks=[InterruptAt(13)]))
        with pytest.raises(KeyboardInterrupt):
            pretrain_all([model], tmp_path, folders[1], quiet)
    run = RunFolder(model.folder(tmp_path))
    assert run.record["status"] == "interrupted"
    assert run.checkpoint_steps() == [10]
    assert pretrain_all([model], tmp_path, folders[1], quiet).done == [model.name]
    whole = tmp_path / "whole"
    pretrain_all([model], whole, folders[1], quiet)
    other = RunFolder(model.folder(whole))
    assert run.result["eval_loss"] == other.result["eval_loss"]
    losses = [[line.get("loss") for line in one.metrics()] for one in (run, other)]
    assert losses[0] == losses[1]


def test_measurements_and_fine_tuning_of_what_is_there(
    trained: Path, folders: tuple[Path, DataSources]
) -> None:
    plan = ExperimentPlan(choose_experiments("gtd,decoder-leak,attention-maps,cost,baselines"), SMOKE, 1)
    measured = measure_all(plan.measurements(), trained, folders[1], quiet)
    assert set(measured.waiting.values()) == {
        *("bert-tiny-low-0.2-seed42", "bert-tiny-elemmul-seed42", "bert-tiny-high-learned-seed42"),
        *("bert-tiny-entropy-seed42", "bert-tiny-eigen-seed42"),
        *("gpt2-tiny-original-seed42", "gpt2-tiny-high-0.2-seed42"),
    }
    assert not measured.failed
    assert "bert-tiny-high-0.2-seed42-measured-race-middle" in measured.done
    taken = json.loads((trained / "measured/bert-tiny-high-0.2-seed42/race-middle.json").read_text())
    assert taken["texts"] == SMOKE.texts
    assert all(0 < head < 1 for heads in taken["layers"]["gtd"] for head in heads)
    assert {point["layer"] for point in taken["points"]} == {0, 1}
    leaks = json.loads((trained / "measured/gpt2-tiny-high-0.2-future-paper-seed42/leak.json").read_text())
    assert leaks["moved"] > 1e-4
    again = measure_all(plan.measurements(), trained, folders[1], quiet)
    assert {*again.reused} == {*measured.done, *measured.reused}  # reused: by other tests of this file
    tuned = ExperimentPlan(choose_experiments("gtd"), SMOKE, 1, "*-high-*").finetune_runs()
    assert finetune_all(tuned, trained, folders[1], quiet).done == [tuned[0].name]
    assert finetune_all(tuned, trained, folders[1], quiet).reused == [tuned[0].name]


def test_smoke_questions_may_have_answers_longer_than_rows_of_pretraining(
    trained: Path, folders: tuple[Path, DataSources]
) -> None:
    """As real ones have, cut into the tokens of a vocabulary of 400."""
    model = RunFolder(trained / "gpt2-tiny-high-0.2-future-paper-seed42").model
    taken = take_measurement("zero-shot", model, SMOKE, 2, folders[1].data_dir)
    assert taken["wikitext"]["length"] == 2
    assert taken["race-middle"]["questions"] == SMOKE.rows


def test_synthetic_data_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("saobp.lab.synthetic_tasks.write_rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_synthetic_data(tmp_path / "data")
    assert not list(tmp_path.iterdir())
    assert (write_synthetic_data(tmp_path / "data") / "made-up" / "part00.parquet").exists()


def test_a_finished_run_without_its_model_is_not_repeated(
    trained: Path, folders: tuple[Path, DataSources], tmp_path: Path
) -> None:
    name = "bert-tiny-high-0.2-seed42"
    shutil.copytree(trained / name, tmp_path / name, ignore=shutil.ignore_patterns("model"))
    plan = ExperimentPlan(choose_experiments("gtd"), SMOKE, 1, "*-high-*")
    assert pretrain_all(plan.pretrain_runs(), tmp_path, folders[1], quiet).reused == [name]
    said: list[str] = []
    result = finetune_all(plan.finetune_runs(), tmp_path, folders[1], said.append)
    assert result.waiting == {f"{name}-race-middle": name}
    assert said == [
        f"1 items wait for models that are not in {tmp_path}: {name}; pretrain them first (--stage pretrain)"
    ]


def test_worker_processes_share_a_stage(trained: Path, folders: tuple[Path, DataSources]) -> None:
    """Two processes take measurements; times are taken alone, afterwards."""
    plan = ExperimentPlan(choose_experiments("sparsity,cost"), SMOKE, 1, "*-original-*")
    own = LabFolders(trained, folders[1].tokens, trained / "results", folders[1].data_dir, is_synthetic=False)
    for one in plan.measurements():
        one.file(trained).unlink(missing_ok=True)
    line = ["saobp", "reproduce", "sparsity,cost", "--seeds", "1", "--only", "*-original-*"]
    line += ["--corpus", "made-up", "--data-dir", str(folders[1].data_dir)]
    line += ["--runs", str(trained), "--tokens", str(folders[1].tokens), "--jobs", "2"]
    said: list[str] = []
    session = Session(plan, own, said.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", line)
        session.run("measure", jobs=2)
    squad, cost = (json.loads(one.file(trained).read_text()) for one in plan.measurements())
    assert squad["environment"]["jobs"] == 2
    assert cost["environment"]["jobs"] == 1
    assert "measure: 0 left to do" not in said
    assert said[-1] == "measure alone: 1 done, 0 there already"


def test_the_command_from_nothing_to_a_page(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    line = ["reproduce", "sparsity", "--seeds", "1", "--runs", str(runs)]
    planned = CliRunner().invoke(app, [*line, "--plan"])
    assert planned.exit_code == 0
    assert "2 of 2 models to pretrain" in planned.output
    assert not (runs / "bert-tiny-original-seed42").exists()
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    page = (runs / "results" / "sparsity" / "smoke.md").read_text()
    assert "| last layer ↓ | High |" in page
    drawn = (runs / "results" / "report-smoke-bert.html").read_text()
    assert "report-smoke-bert.html" in done.output.replace("\n", "")
    assert "bert-tiny-original-seed42" in drawn
    assert "0 of 2 models to pretrain" in CliRunner().invoke(app, [*line, "--plan"]).output


def test_what_failed_leaves_the_rest_going_and_an_exit_code(
    trained: Path, folders: tuple[Path, DataSources], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("the texts are gone")

    for name in ("bert-tiny-original-seed42", "bert-tiny-high-0.2-seed42"):
        shutil.copytree(trained / name, tmp_path / name)
    monkeypatch.setattr("saobp.lab.stages.take_measurement", broken)
    line = ["reproduce", "sparsity", "--seeds", "1", "--stage", "measure,tabulate", "--corpus", "made-up"]
    line += ["--runs", str(tmp_path), "--out", str(tmp_path / "out"), "--data-dir", str(folders[1].data_dir)]
    failed = CliRunner().invoke(app, line)
    assert failed.exit_code == 1
    assert "measured-squad failed: the texts are gone" in failed.output
    assert "measure: 0 done, 0 there already, 2 failed" in failed.output
    assert "README.md" in failed.output
    shared = CliRunner().invoke(app, line, env={"SAOBP_STAGE": "measure"})
    assert shared.exit_code == 1
    assert "measure: 0 done, 0 there already, 2 failed" in shared.output


def test_an_interruption_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("saobp.lab.session.Session.run", interrupted)
    stopped = CliRunner().invoke(app, ["reproduce", "sparsity", "--seeds", "1", "--runs", str(tmp_path)])
    assert stopped.exit_code == 130
    assert "The same command goes on" in stopped.output


def test_the_command_explains_itself() -> None:
    listed = CliRunner().invoke(app, ["reproduce", "--list"])
    assert "decoder-leak" in listed.output
    assert "saobp reproduce --list" in CliRunner().invoke(app, ["reproduce"]).output
    wrong = CliRunner().invoke(app, ["reproduce", "gtd", "--stage", "dance"])
    assert wrong.exit_code == 1
    assert "unknown stage 'dance'" in wrong.output


def test_a_distributed_launch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes would take different runs, and each wait for the other in its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = CliRunner().invoke(app, ["reproduce", "gtd", "--runs", str(tmp_path / "runs")])
    assert refused.exit_code == 1
    assert "leave accelerate launch out" in refused.output
    assert not (tmp_path / "runs").exists()

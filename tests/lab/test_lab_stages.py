"""The stages end to end at the smoke scale: runs are made once, resumed, packed, measured and tabulated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab import choose_experiments, get_scale
from saobp.lab.bundle import is_rounded, keep_rounded, pack, small_files, unpack
from saobp.lab.clock import Deadline, TimeIsUpError
from saobp.lab.plan import Plan
from saobp.lab.pretraining import check_same, pretrain_all
from saobp.lab.sources import Sources, make_up
from saobp.lab.stages import NO_MODEL, finetune_all, measure_all
from saobp.training.evaluation.run import load_language_model
from saobp.training.runs import RunError, RunFolder

SMOKE = get_scale("smoke")


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sources]:
    root = tmp_path_factory.mktemp("lab")
    return root / "runs", Sources(SMOKE, root / "tokens", make_up(root / "data"))


@pytest.fixture(scope="module")
def trained(places: tuple[Path, Sources]) -> Path:
    """Two BERTs and two GPT-2s."""
    runs, sources = places
    for target, only in (("gtd", "*-high-*"), ("gtd", "*-original-*"), ("decoder-leak", "*-future-paper-*")):
        models = Plan(choose_experiments(target), SMOKE, 1, only).trained()
        result = pretrain_all(models, runs, sources, say=quiet)
        assert len(result.done) == len(models) == 1
    return runs


def test_a_finished_run_is_reused(trained: Path, places: tuple[Path, Sources]) -> None:
    models = Plan(choose_experiments("gtd"), SMOKE, 1, "*-high-*").trained()
    before = (models[0].folder(trained) / "result.json").stat().st_mtime_ns
    result = pretrain_all(models, trained, places[1], say=quiet)
    assert result.reused == ["bert-tiny-high-0.2-seed42"]
    assert not result.done
    assert (models[0].folder(trained) / "result.json").stat().st_mtime_ns == before


def test_a_finished_run_of_another_recipe_is_refused(trained: Path) -> None:
    run = RunFolder(trained / "bert-tiny-high-0.2-seed42")
    with pytest.raises(RunError, match="had another refinement"):
        check_same(run, SMOKE.recipe_of("bert", "low", 42))


def test_no_run_is_begun_that_would_not_end_in_time(places: tuple[Path, Sources], tmp_path: Path) -> None:
    models = Plan(choose_experiments("gtd"), SMOKE, 1).trained()
    result = pretrain_all(models, tmp_path, places[1], deadline=Deadline(0.001), say=quiet)
    assert result.left == [model.name for model in models]
    assert not any(tmp_path.iterdir())


def test_a_run_that_was_stopped_goes_on(
    places: tuple[Path, Sources], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Plan(choose_experiments("gtd"), SMOKE, 1, "*-low-*").trained()[0]
    written = RunFolder.log_metrics

    def time_is_up(self: RunFolder, line: dict[str, float]) -> None:
        written(self, line)
        if line["step"] == 15:
            raise TimeIsUpError

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log_metrics", time_is_up)
        stopped = pretrain_all([model], tmp_path, places[1], say=quiet)
    assert stopped.left == [model.name]
    run = RunFolder(model.folder(tmp_path))
    assert run.record["status"] == "failed"
    assert run.checkpoint_steps() == [10]
    assert pretrain_all([model], tmp_path, places[1], say=quiet).done == [model.name]
    whole = tmp_path / "whole"
    pretrain_all([model], whole, places[1], say=quiet)
    assert run.result["eval_loss"] == RunFolder(model.folder(whole)).result["eval_loss"]


def test_a_run_that_fails_leaves_the_others_going(
    places: tuple[Path, Sources], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import saobp.lab.pretraining as stage

    models = Plan(choose_experiments("gtd"), SMOKE, 1).trained()[:2]
    train = stage.pretrain

    def fails_for_original(recipe, *args, **kwargs):  # type: ignore[no-untyped-def]
        if recipe.refinement is None:
            raise ValueError("no luck\nat all")
        return train(recipe, *args, **kwargs)

    monkeypatch.setattr(stage, "pretrain", fails_for_original)
    result = pretrain_all(models, tmp_path, places[1], say=quiet)
    assert result.failed == {models[0].name: "no luck"}
    assert result.done == [models[1].name]


def test_measurements_and_fine_tuning_of_what_is_there(trained: Path, places: tuple[Path, Sources]) -> None:
    plan = Plan(choose_experiments("gtd,decoder-leak,attention-maps,cost,baselines"), SMOKE, 1)
    measured = measure_all(plan.measured(), trained, places[1], say=quiet)
    assert set(measured.failed.values()) == {NO_MODEL}
    assert "bert-tiny-high-0.2-seed42-race-middle" in measured.done
    taken = json.loads((trained / "measured/bert-tiny-high-0.2-seed42/race-middle.json").read_text())
    assert taken["texts"] == SMOKE.texts
    assert all(0 < head < 1 for heads in taken["layers"]["gtd"] for head in heads)
    assert {point["layer"] for point in taken["points"]} == {0, 1}
    leaks = json.loads((trained / "measured/gpt2-tiny-high-0.2-future-paper-seed42/leak.json").read_text())
    assert leaks["moved"] > 1e-4
    again = measure_all(plan.measured(), trained, places[1], say=quiet)
    assert again.reused == measured.done
    tuned = Plan(choose_experiments("gtd"), SMOKE, 1, "*-high-*").tuned()
    assert finetune_all(tuned, trained, places[1], say=quiet).done == [tuned[0].name]
    assert finetune_all(tuned, trained, places[1], say=quiet).reused == [tuned[0].name]


def test_small_files_travel_and_models_on_demand(trained: Path, tmp_path: Path) -> None:
    assert not any("model" in name.parts for name in small_files(trained))
    models = small_files(trained, "*-high-0.2-seed42")
    assert {name.parts[0] for name in models if "model" in name.parts} == {"bert-tiny-high-0.2-seed42"}
    parts = pack(trained, tmp_path / "packed", models="*-high-0.2-seed42", part_bytes=50_000)
    assert len(parts) > 1
    names = unpack(parts, tmp_path / "home")
    assert len(names) == len(models)
    home = tmp_path / "home" / "bert-tiny-high-0.2-seed42"
    assert RunFolder(home).result == RunFolder(trained / home.name).result
    load_language_model(home / "model")


def test_a_rounded_model_is_nearly_the_same(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(trained / "bert-tiny-high-0.2-seed42" / "model", folder)
    exact, _, _ = load_language_model(folder)
    keep_rounded(folder)
    assert is_rounded(folder)
    rounded, _, _ = load_language_model(folder)
    for (name, own), (_, other) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        assert other.dtype == torch.float32
        torch.testing.assert_close(own, other, rtol=0 if own.ndim < 2 else 2**-8, atol=0, msg=name)


def test_the_command_from_nothing_to_a_page(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    line = ["reproduce", "sparsity", "--seeds", "1", "--runs", str(runs)]
    planned = CliRunner().invoke(app, [*line, "--plan"])
    assert planned.exit_code == 0
    assert "2 of 2 models to pretrain" in planned.output
    assert not (runs / "bert-tiny-original-seed42").exists()
    done = CliRunner().invoke(app, [*line, "--pack", str(tmp_path / "packed")])
    assert done.exit_code == 0, done.output
    page = (runs / "results" / "sparsity" / "smoke.md").read_text()
    assert "| last layer | High |" in page
    drawn = (runs / "results" / "report-smoke.html").read_text()
    assert "report-smoke.html" in done.output.replace("\n", "")
    assert "bert-tiny-original-seed42" in drawn
    assert (tmp_path / "packed" / "runs.tar.xz.00").exists()
    assert "0 of 2 models to pretrain" in CliRunner().invoke(app, [*line, "--plan"]).output


def test_the_command_explains_itself() -> None:
    listed = CliRunner().invoke(app, ["reproduce", "--list"])
    assert "decoder-leak" in listed.output
    assert "saobp reproduce --list" in CliRunner().invoke(app, ["reproduce"]).output
    wrong = CliRunner().invoke(app, ["reproduce", "gtd", "--stage", "dance"])
    assert wrong.exit_code == 1
    assert "unknown stage 'dance'" in wrong.output
    share = CliRunner().invoke(app, ["reproduce", "gtd", "--share", "3/2"])
    assert "a share is written as in 1/4" in share.output

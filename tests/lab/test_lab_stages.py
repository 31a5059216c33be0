"""The stages end to end at the smoke scale: runs are made once, resumed, packed, measured and tabulated."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab import choose_experiments, get_scale
from saobp.lab.bundle import is_rounded, keep_rounded, kept_packed, pack, small_files, unpack
from saobp.lab.clock import Deadline
from saobp.lab.data_sources import Sources, make_up
from saobp.lab.measurements import take
from saobp.lab.plan import Plan, check_same
from saobp.lab.pretraining import pretrain_all
from saobp.lab.session import Places, Session
from saobp.lab.stages import finetune_all, measure_all
from saobp.runs.folder import RunError, RunFolder
from saobp.training.evaluation.run import load_language_model

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
    with pytest.raises(RunError, match="differs in refinement"):
        check_same(run, SMOKE.recipe_of("bert", "low", 42))


def test_no_run_is_begun_that_would_not_end_in_time(places: tuple[Path, Sources], tmp_path: Path) -> None:
    models = Plan(choose_experiments("gtd"), SMOKE, 1).trained()
    result = pretrain_all(models, tmp_path, places[1], deadline=Deadline(0.001), say=quiet)
    assert result.left == [model.name for model in models]
    assert not any(tmp_path.iterdir())


def test_no_run_is_begun_that_would_be_stopped_at_once(places: tuple[Path, Sources], tmp_path: Path) -> None:
    """Five seconds are enough for a run of two, but it would be stopped six seconds before the end."""
    models = Plan(choose_experiments("gtd"), SMOKE, 1).trained()
    result = pretrain_all(models, tmp_path, places[1], deadline=Deadline(5 / 60), say=quiet)
    assert result.left == [model.name for model in models]
    assert not any(tmp_path.iterdir())


class NearAfter(Deadline):
    """Near from the second look on; a look is taken at each step."""

    looks = 0

    @property
    def is_near(self) -> bool:
        self.looks += 1
        return self.looks >= 7


def test_a_run_that_was_stopped_goes_on(places: tuple[Path, Sources], tmp_path: Path) -> None:
    """The deadline leaves a checkpoint; the run that goes on from it is the one that was never stopped."""
    model = Plan(choose_experiments("gtd"), SMOKE, 1, "*-low-*").trained()[0]
    stopped = pretrain_all([model], tmp_path, places[1], deadline=NearAfter(), say=quiet)
    assert stopped.left == [model.name]
    run = RunFolder(model.folder(tmp_path))
    assert run.record["status"] == "failed"
    assert run.checkpoint_steps() == [7]
    assert pretrain_all([model], tmp_path, places[1], say=quiet).done == [model.name]
    whole = tmp_path / "whole"
    pretrain_all([model], whole, places[1], say=quiet)
    other = RunFolder(model.folder(whole))
    assert run.result["eval_loss"] == other.result["eval_loss"]
    losses = [[line.get("loss") for line in one.metrics()] for one in (run, other)]
    assert losses[0] == losses[1]


def test_measurements_and_fine_tuning_of_what_is_there(trained: Path, places: tuple[Path, Sources]) -> None:
    plan = Plan(choose_experiments("gtd,decoder-leak,attention-maps,cost,baselines"), SMOKE, 1)
    measured = measure_all(plan.measured(), trained, places[1], say=quiet)
    assert set(measured.lacking.values()) == {
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
    again = measure_all(plan.measured(), trained, places[1], say=quiet)
    assert again.reused == measured.done
    tuned = Plan(choose_experiments("gtd"), SMOKE, 1, "*-high-*").tuned()
    assert finetune_all(tuned, trained, places[1], say=quiet).done == [tuned[0].name]
    assert finetune_all(tuned, trained, places[1], say=quiet).reused == [tuned[0].name]


def test_smoke_questions_may_have_answers_longer_than_rows_of_pretraining(
    trained: Path, places: tuple[Path, Sources]
) -> None:
    """As real ones have, cut into the tokens of a vocabulary of 400."""
    model = RunFolder(trained / "gpt2-tiny-high-0.2-future-paper-seed42").model
    taken = take("zero-shot", model, SMOKE, 2, places[1].data_dir)
    assert taken["wikitext"]["length"] == 2
    assert taken["race-middle"]["questions"] == SMOKE.rows


def test_small_files_travel_and_models_on_demand(trained: Path, tmp_path: Path) -> None:
    unfinished = trained / "bert-tiny-unfinished-seed42"
    unfinished.mkdir(exist_ok=True)
    (unfinished / "recipe.json").write_text("{}")
    small = small_files(trained)
    assert not any("model" in name.parts or unfinished.name in name.parts for name in small)
    out = tmp_path / "packed"
    first = pack(trained, out, models="*-high-0.2-seed42", part_bytes=50_000)
    assert {path.name.partition("-model-")[0] for path in first[1:]} == {"bert-tiny-high-0.2-seed42"}
    assert pack(trained, out, models="*-high-0.2-seed42", part_bytes=50_000) == []
    names = unpack(out, tmp_path / "home", quiet)
    assert {name for name in names if "/model/" not in name} == {name.as_posix() for name in small}
    home = tmp_path / "home" / "bert-tiny-high-0.2-seed42"
    assert RunFolder(home).result == RunFolder(trained / home.name).result
    load_language_model(home / "model")


def test_a_packed_archive_is_whole_or_left_out(trained: Path, tmp_path: Path) -> None:
    """As after a kill: a new archive of which not all parts were written lies beside the old one."""
    runs, out = tmp_path / "runs", tmp_path / "packed"
    shutil.copytree(trained / "bert-tiny-high-0.2-seed42", runs / "first")
    old = pack(runs, out)
    kept = {path: path.read_bytes() for path in old}
    shutil.copytree(trained / "bert-tiny-original-seed42", runs / "second")
    new = pack(runs, out, part_bytes=3000)
    assert not any(path.exists() for path in old)
    for path, content in kept.items():
        path.write_bytes(content)
    new[1].unlink()
    said: list[str] = []
    unpack(out, tmp_path / "home", said.append)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["first"]
    assert said
    assert all("parts are there" in sentence for sentence in said)
    with pytest.raises(ValueError, match="there is nothing to unpack"):
        unpack(tmp_path / "home", tmp_path)


def test_data_are_made_up_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("saobp.lab.data_sources.write_rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_up(tmp_path / "data")
    assert not list(tmp_path.iterdir())
    assert (make_up(tmp_path / "data") / "made-up" / "part00.parquet").exists()


def test_what_is_finished_is_packed_meanwhile(trained: Path, tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "packed"
    with kept_packed(runs, out, say=quiet, every=0.01):
        shutil.copytree(trained / "bert-tiny-high-0.2-seed42", runs / "first")
        while not list(out.glob("*.tar.xz")):
            time.sleep(0.01)
    shutil.copytree(out, out / "a copy below")
    said: list[str] = []
    assert "first/result.json" in unpack(out, tmp_path / "home", said.append)
    assert not said


def test_a_finished_run_without_its_model_is_not_repeated_and_said_to_lack_it(
    trained: Path, places: tuple[Path, Sources], tmp_path: Path
) -> None:
    unpack_to = tmp_path / "runs"
    pack(trained, tmp_path / "packed")
    unpack(tmp_path / "packed", unpack_to, quiet)
    plan = Plan(choose_experiments("gtd"), SMOKE, 1, "*-high-*")
    again = pretrain_all(plan.trained(), unpack_to, places[1], rounded=True, say=quiet)
    assert again.reused == ["bert-tiny-high-0.2-seed42"]
    shutil.rmtree(unpack_to / "tasks", ignore_errors=True)
    said: list[str] = []
    tuned = finetune_all(plan.tuned(), unpack_to, places[1], say=said.append)
    assert tuned.lacking == {"bert-tiny-high-0.2-seed42-race-middle": "bert-tiny-high-0.2-seed42"}
    assert said == [
        f"1 pieces of work wait for models that are not in {unpack_to}: bert-tiny-high-0.2-seed42; "
        "pretrain them here, or bring them with --unpack"
    ]


def test_processes_side_by_side_share_a_stage(trained: Path, places: tuple[Path, Sources]) -> None:
    """Two processes take measurements; times are taken alone, afterwards."""
    plan = Plan(choose_experiments("sparsity,cost"), SMOKE, 1, "*-original-*")
    folders = Places(trained, places[1].tokens, trained / "results", places[1].data_dir, invents=False)
    for one in plan.measured():
        one.file(trained).unlink(missing_ok=True)
    line = ["saobp", "reproduce", "sparsity,cost", "--seeds", "1", "--only", "*-original-*"]
    line += ["--corpus", "made-up", "--data-dir", str(places[1].data_dir)]
    line += ["--runs", str(trained), "--tokens", str(places[1].tokens), "--jobs", "2", "--minutes", "5"]
    said: list[str] = []
    session = Session(plan, folders, Deadline(5), say=said.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", line)
        session.do("measure", jobs=2)
    squad, cost = (json.loads(one.file(trained).read_text()) for one in plan.measured())
    assert squad["environment"]["jobs"] == 2
    assert cost["environment"]["jobs"] == 1
    assert "measure: 0 left to do" not in said
    assert said[-1] == "measure alone: 1 done, 0 there already"


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
    assert "| last layer ↓ | High |" in page
    drawn = (runs / "results" / "report-smoke-bert.html").read_text()
    assert "report-smoke-bert.html" in done.output.replace("\n", "")
    assert "bert-tiny-original-seed42" in drawn
    assert len(list((tmp_path / "packed").glob("runs-*.1of1.tar.xz"))) == 1
    assert "0 of 2 models to pretrain" in CliRunner().invoke(app, [*line, "--plan"]).output


def test_what_failed_leaves_the_rest_going_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("the texts are gone")

    monkeypatch.setattr("saobp.lab.stages.take", broken)
    line = ["reproduce", "sparsity", "--seeds", "1", "--runs", str(tmp_path)]
    failed = CliRunner().invoke(app, line)
    assert failed.exit_code == 1
    assert "measured-squad failed: the texts are gone" in failed.output
    assert "measure: 0 done, 0 there already, 2 failed" in failed.output
    assert "README.md" in failed.output
    shared = CliRunner().invoke(app, line, env={"SAOBP_STAGE": f"measure:{time.time()}"})
    assert shared.exit_code == 1
    assert "measure: 0 done, 0 there already, 2 failed" in shared.output


def test_an_interruption_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("saobp.lab.session.Session.do", interrupted)
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

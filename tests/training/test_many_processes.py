"""Two processes, each with the whole model or a part of it, give the loss curve of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import fsdp_utils
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import saobp
from saobp.runs.folder import RunError, RunFolder
from saobp.testing.tiny_training import in_processes, prose, small_recipe, train_small
from saobp.training import trainer
from saobp.training.recipes import PretrainRecipe
from saobp.transformers import strength_parameters


@pytest.mark.parametrize(("family", "accumulation"), [("bert", 1), ("gpt2", 2)])
def test_two_processes_learn_as_one_does(tmp_path: Path, family: str, accumulation: int) -> None:
    recipe = small_recipe(
        family=family, steps=6, accumulation=accumulation, refinement="high:learned", evaluation_steps=3
    )
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    train_small(replace(recipe, accumulation=1), one.path)
    in_processes(2, lambda: train_small(recipe, two.path))
    check_same_curve(one, two)


def test_processes_drop_different_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = trainer.PretrainTrainer.training_step

    def step(self: trainer.PretrainTrainer, *rest: Any) -> torch.Tensor:
        torch.save(torch.get_rng_state(), tmp_path / f"{os.environ['RANK']}.pt")
        return original(self, *rest)

    monkeypatch.setattr(trainer.PretrainTrainer, "training_step", step)
    in_processes(2, lambda: train_small(small_recipe(steps=3, dropout=0.1), tmp_path / "run"))
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert not torch.equal(*states)


def check_same_curve(one: RunFolder, two: RunFolder) -> None:
    """Numbers of two processes are those of one but for the order of sums.

    float32 keeps seven digits; over six steps of Adam, whose first ones divide small gradients by themselves,
    the last two of them go. Strengths move about 0.04 in these steps, at ten times the rate.
    """
    assert two.record["environment"]["processes"] == 2
    single, both = one.metrics(), two.metrics()
    assert [line["step"] for line in both] == [line["step"] for line in single] == [1, 2, 3, 3, 4, 5, 6, 6]
    for mine, theirs in zip(both, single, strict=True):
        names = {"loss", "eval_loss", "grad_norm"} & set(theirs)
        assert [mine[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=2e-5)
    for mine, theirs in zip(two.health(), one.health(), strict=True):
        for heads, others in zip(mine["statistics"]["gtd"], theirs["statistics"]["gtd"], strict=True):
            assert heads == pytest.approx(others, rel=1e-4)
    for heads, others in zip(two.result["strengths"], one.result["strengths"], strict=True):
        assert heads == pytest.approx(others, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "kind", "accumulation"),
    [("bert", "SHARDED_STATE_DICT", 1), ("gpt2", "FULL_STATE_DICT", 2), ("modernbert", "FULL_STATE_DICT", 1)],
)
def test_a_divided_model_learns_as_a_whole_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str, accumulation: int
) -> None:
    """FSDP 2 on CPUs: losses, evaluations, health, strengths, and a model that loads as any other."""
    recipe = small_recipe(
        family=family,
        steps=6,
        accumulation=accumulation,
        refinement="high:learned",
        evaluation_steps=3,
        compiled=True,
    )
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    train_small(replace(recipe, accumulation=1, compiled=False), one.path)
    monkeypatch.setattr(trainer.PretrainTrainer, "training_step", divided(trainer.PretrainTrainer))
    in_processes(2, lambda: train_small(recipe, two.path), sharded=kind)
    check_same_curve(one, two)
    assert two.result["parameters"] == one.result["parameters"]
    weights = [load_file(run.model / "model.safetensors") for run in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=1e-4, msg=name)
    loaded = saobp.load(two.model, AutoModelForCausalLM if family == "gpt2" else AutoModelForMaskedLM)
    assert len(strength_parameters(loaded)) == 1


def divided(kind: type[trainer.PretrainTrainer]) -> Callable[..., torch.Tensor]:
    """A step that checks: every weight divided, strengths in a group without decay, nothing compiled."""
    original = kind.training_step

    def step(self: trainer.PretrainTrainer, model: torch.nn.Module, *rest: Any) -> torch.Tensor:
        if self.state.global_step == 0:
            assert all(isinstance(weight, DTensor) for weight in model.parameters())
        groups = self.optimizer.optimizer.param_groups
        held = sum(p.numel() for group in groups for p in group["params"])
        assert held == self.parameters
        assert [(len(group["params"]), group["weight_decay"]) for group in groups][-1] == (1, 0.0)
        assert groups[-1]["params"][0] is strength_parameters(model)[0]
        before = dict(counters["frames"])  # earlier tests of this process may have compiled
        found = original(self, model, *rest)
        assert dict(counters["frames"]) == before
        return found

    return step


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_divided_run_that_was_killed_goes_on_as_if_nothing_had_been(tmp_path: Path, kind: str) -> None:
    recipe = small_recipe(steps=6, refinement="high:learned", dropout=0.1, checkpoint_steps=4)
    straight, killed = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "killed")
    in_processes(2, lambda: train_small(recipe, straight.path), sharded=kind)
    with pytest.raises(RuntimeError, match=r"\[-9, -9\]"):
        in_processes(2, lambda: killed_after_checkpoint(recipe, killed.path), sharded=kind)
    assert killed.last_good_checkpoint() == 4
    in_processes(2, lambda: train_small(recipe, killed.path, resume=True), sharded=kind)
    timeless = [
        [{k: v for k, v in line.items() if "second" not in k} for line in run.metrics()]
        for run in (straight, killed)
    ]
    assert timeless[0] == timeless[1]
    assert [line["step"] for line in timeless[0]] == [1, 2, 3, 4, 4, 5, 6, 6]
    weights = [(run.model / "model.safetensors").read_bytes() for run in (straight, killed)]
    assert weights[0] == weights[1]


def killed_after_checkpoint(recipe: PretrainRecipe, folder: Path) -> None:
    saved = trainer.PretrainTrainer._save_checkpoint

    def save(self: trainer.PretrainTrainer, *rest: Any) -> None:
        saved(self, *rest)
        os.kill(os.getpid(), signal.SIGKILL)

    trainer.PretrainTrainer._save_checkpoint = save  # type: ignore[method-assign]
    train_small(recipe, folder)


def test_a_full_disk_costs_a_divided_run_a_checkpoint_or_ends_it(tmp_path: Path) -> None:
    """Where each process writes its part the run goes on; gathered by one, it ends without waiting."""
    recipe = small_recipe(steps=4)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def train(name: str, module: Any, function: str) -> None:
        rank = os.environ["RANK"]
        if rank == "0":
            setattr(module, function, full)
        said: list[str] = []
        try:
            train_small(recipe, tmp_path / name, notify=said.append)
        except RunError as problem:
            said.append(str(problem))
            raise
        finally:
            (tmp_path / f"{name}-{rank}").write_text("\n".join(said))

    in_processes(2, lambda: train("parts", filesystem, "_write_item"), sharded="SHARDED_STATE_DICT")
    assert (tmp_path / "parts-0").read_text() == (
        "The checkpoint of step 2 could not be written (the disk is full); there is none before it, and the "
        "run goes on."
    )
    with pytest.raises(RuntimeError, match=r"\[1, 1\]"):
        in_processes(2, lambda: train("one", fsdp_utils.torch, "save"), sharded="FULL_STATE_DICT")
    assert (tmp_path / "one-0").read_text() == (
        "the checkpoint of step 2 could not be written (the disk is full), which ends a run that divides its "
        "model: mend that, then go on by --resume"
    )


def test_what_fsdp_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="add --fsdp_version 2"):
        train_small(small_recipe(), tmp_path / "old")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="leave --use_fsdp out"):
        train_small(small_recipe(regularizer="entropy"), tmp_path / "regularized")
    assert not list(tmp_path.iterdir())
    said: list[str] = []
    train_small(small_recipe(steps=3), tmp_path / "whole", notify=said.append)
    assert said == [
        "Accelerate divides models on accelerators only: here every process keeps the whole model (DDP)."
    ]


def test_all_processes_refuse_what_the_first_refuses(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("not a run")
    with pytest.raises(RuntimeError, match=r"\[1, 1\]"):
        in_processes(2, lambda: train_small(small_recipe(), tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]


@pytest.mark.parametrize("file", ["recipe.json", "metrics.jsonl"])
def test_all_processes_say_what_the_first_cannot_read(tmp_path: Path, file: str) -> None:
    run = tmp_path / "run"
    if file == "metrics.jsonl":
        RunFolder.start(run, "pretrain", small_recipe().to_dict(), seed=42)
    run.mkdir(exist_ok=True)
    (run / file).write_text("{ cut short\n{}\n")

    def resumed() -> None:
        try:
            train_small(small_recipe(), run, resume=True)
        except ValueError as problem:
            (tmp_path / os.environ["RANK"]).write_text(str(problem))

    in_processes(2, resumed)
    for rank in "01":
        assert file in (tmp_path / rank).read_text()


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose a batch size that 3 divides"):
        train_small(small_recipe(accumulation=3), tmp_path)


@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path) -> None:
    """As documented: without a GPU, two processes on CPUs."""
    (tmp_path / "prose.txt").write_text(prose(400))
    asked = "--corpus prose.txt --recipe tiny --vocabulary 60 --steps 20 --held-out 0.1 --refinement high:0.2"
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    source = str(Path(saobp.__file__).parents[1])
    for name, before in (("one", []), ("two", launch)):
        subprocess.run(
            [sys.executable, *before, "-m", "saobp", "pretrain", *asked.split(), "--out", name],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source},
            check=True,
        )
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    assert two.record["environment"]["processes"] == 2
    assert two.result["loss"] == pytest.approx(one.result["loss"], rel=1e-4)

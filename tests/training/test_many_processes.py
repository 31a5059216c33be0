"""Two processes give the loss curve of one with the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import saobp
from saobp.testing.training import in_processes, prose, small_recipe, train_small
from saobp.training.runs import RunFolder


@pytest.mark.parametrize(("family", "accumulation"), [("bert", 1), ("gpt2", 2)])
def test_two_processes_learn_as_one_does(tmp_path: Path, family: str, accumulation: int) -> None:
    recipe = small_recipe(
        family=family, steps=6, accumulation=accumulation, refinement="high:learned", evaluation_steps=3
    )
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    train_small(small_recipe(**{**vars_of(recipe), "accumulation": 1}), one.path)
    in_processes(2, lambda: train_small(recipe, two.path))
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


def vars_of(recipe: object) -> dict[str, object]:
    return {name: value for name, value in vars(recipe).items() if name not in ("name", "size")}


def test_all_processes_refuse_what_the_first_refuses(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("not a run")
    with pytest.raises(RuntimeError, match=r"\[1, 1\]"):
        in_processes(2, lambda: train_small(small_recipe(), tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]


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

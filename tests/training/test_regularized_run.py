"""A regularizer in a pretraining run, and the model family of the quickstart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from saobp.runs.folder import RunFolder
from saobp.testing.tiny_training import in_processes, small_recipe, train_small
from saobp.training.architectures import build_model
from saobp.training.objectives import head_scores, hidden_states


@pytest.mark.parametrize("regularizer", ["entropy,weight=1,margin=0", "eigen,weight=1"])
def test_a_run_learns_with_a_regularizer_and_saves_the_model_alone(tmp_path: Path, regularizer: str) -> None:
    weights = []
    for name, chosen in (("plain", None), ("regularized", regularizer)):
        train_small(small_recipe(steps=6, regularizer=chosen), tmp_path / name)
        weights.append(load_file(tmp_path / name / "model" / "model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    moved = [
        (weights[0][name] - weights[1][name]).abs().max() for name in weights[0] if "query.weight" in name
    ]
    assert min(moved) > 1e-4


def test_a_summed_penalty_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Computed at once, in two parts, or by two processes."""
    recipe = small_recipe(steps=3, regularizer="entropy,weight=1,threshold=0.9,reduction=released")
    train_small(recipe, tmp_path / "whole")
    train_small(replace(recipe, accumulation=2), tmp_path / "parts")
    in_processes(2, lambda: train_small(recipe, tmp_path / "processes"))
    whole, parts, processes = (
        [line["loss"] for line in RunFolder(tmp_path / name).metrics() if "loss" in line]
        for name in ("whole", "parts", "processes")
    )
    assert parts == pytest.approx(whole, rel=2e-5)
    assert processes == pytest.approx(whole, rel=2e-5)


def test_thresholds_survive_a_checkpoint(tmp_path: Path) -> None:
    """What is learned is in the checkpoint, and a resumed run goes on as one that never stopped."""
    recipe = small_recipe(steps=6, checkpoint_steps=2, regularizer="entropy,weight=1,margin=0")
    whole = train_small(recipe, tmp_path / "whole")
    stopped = tmp_path / "stopped"
    before = RunFolder.log_metrics

    def stop(self: RunFolder, line: dict) -> None:
        before(self, line)
        if line.get("step") == 5:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "log_metrics", stop)
        with pytest.raises(KeyboardInterrupt):
            train_small(recipe, stopped)
    kept = [load_file(file) for file in stopped.glob("checkpoints/step-000004/*.safetensors")]
    learned = [values for one in kept for name, values in one.items() if "threshold_bias" in name]
    assert learned
    assert not torch.equal(learned[0], torch.full_like(learned[0], 0.5))
    assert train_small(recipe, stopped, resume=True).eval_loss == whole.eval_loss


def test_modernbert_is_a_family() -> None:
    model = build_model("modernbert", "micro", vocabulary=100, length=16, dropout=0.0, padding=0, seed=0)
    ids = torch.randint(5, 100, (2, 16))
    scores = head_scores(model, hidden_states(model, ids, "fp32"), "fp32")
    torch.testing.assert_close(scores, model(input_ids=ids).logits)
    assert hidden_states(model, ids, "bf16").dtype == torch.bfloat16

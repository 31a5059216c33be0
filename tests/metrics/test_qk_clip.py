"""QKClip holds its bound, and touches only the heads beyond it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

import saobp
from saobp.metrics import QKClip
from saobp.testing.tiny_models import tiny_batch, tiny_model


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = tiny_batch(batch=1, length=10, seed=index)["input_ids"][0]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def trainer_of(model: PreTrainedModel, folder, steps: int, rate: float = 0.0, **options) -> Trainer:  # type: ignore[no-untyped-def]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=Texts())


def max_logits(model: PreTrainedModel) -> list[Tensor]:
    texts = Texts()
    batch = {
        name: torch.stack([texts[i][name] for i in range(len(texts))])
        for name in ("input_ids", "attention_mask")
    }
    with torch.no_grad(), saobp.watch(model.eval()) as heads:
        model(**batch)
    return list(heads.values("max_logit").values())


NO_DROPOUT = {"bert": "hidden_dropout_prob", "distilbert": "dropout", "gpt2": "embd_pdrop"}
"""Dropout of the embeddings, which would make a step's inputs others than those looked at."""


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "llama", "mistral", "modernbert"])
def test_one_clip_brings_the_first_layer_to_its_bound(family: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    options = {NO_DROPOUT[family]: 0.0} if family in NO_DROPOUT else {}
    model = tiny_model(family, initializer_range=0.8, **options)
    before = max_logits(model)[0]
    bound = float(before.median())
    run = trainer_of(model, tmp_path, 1)
    run.add_callback(QKClip(run, threshold=bound))
    run.train()
    after = max_logits(model)[0]
    torch.testing.assert_close(after, before.clamp(max=bound), rtol=1e-4, atol=1e-4)
    assert (before > bound).any()


def test_further_clips_bring_all_layers_to_the_bound(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Clipped heads of a layer change what the layers above it read."""
    model = tiny_model("llama", initializer_range=0.8)
    bound = max(float(top.max()) for top in max_logits(model)) / 5
    run = trainer_of(model, tmp_path, 8)
    run.add_callback(QKClip(run, threshold=bound))
    run.train()
    assert max(float(top.max()) for top in max_logits(model)) <= bound * 1.001


@pytest.mark.parametrize(("family", "accumulated"), [("llama", 1), ("gpt2", 2)])
def test_training_stays_within_the_bound(family: str, accumulated: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """At a rate that drives logits up, they pass the bound by no more than one step's change."""
    bound, reached = 6.0, {}
    for clipped in (False, True):
        model = tiny_model(family)
        run = trainer_of(model, tmp_path, 30, 0.05, gradient_accumulation_steps=accumulated)
        if clipped:
            run.add_callback(QKClip(run, threshold=bound))
        run.train()
        reached[clipped] = max(float(top.max()) for top in max_logits(model))
    assert reached[False] > 3 * bound
    assert reached[True] < 1.5 * bound
    logs = [entry["qk_clip/heads"] for entry in run.state.log_history if "qk_clip/heads" in entry]
    assert len(logs) == 30
    assert sum(logs) > 0
    assert "training_step" not in run.__dict__


def test_below_the_bound_nothing_changes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    weights = []
    for clipped in (False, True):
        model = tiny_model("llama")
        run = trainer_of(model, tmp_path, 3, 1e-3)
        if clipped:
            run.add_callback(QKClip(run, threshold=1e6))
        run.train()
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_models_that_cannot_be_clipped_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = trainer_of(tiny_model("qwen3"), tmp_path, 1)
    with pytest.raises(ValueError, match=r"normalises its queries and keys \(q_norm, k_norm\)"):
        QKClip(run)
    with pytest.raises(ValueError, match="threshold must be above 0"):
        QKClip(trainer_of(tiny_model("bert"), tmp_path, 1), threshold=0)

"""Fine-tuning by captured steps learns what launched ones learn: every kind of task, several lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BartConfig, BertConfig, BertForSequenceClassification, PreTrainedModel

from saobp.data.tasks import ALL, load_task
from saobp.lab.synthetic_tasks import write_tasks
from saobp.runs.folder import RunFolder
from saobp.testing.tiny_models import save_tiny_bert
from saobp.training import graphed_step
from saobp.training.finetune import finetune, recipe_for, trainer
from saobp.training.finetune.trainer import TaskTrainer, capture_for, without_full_mask
from saobp.training.graphed_step import GraphedStep
from saobp.transformers import strength_parameters

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
TASKS = ("mrpc", "stsb", "squad", "hellaswag")
BATCH = 8


def tuned(folder: Path, name: str, *, dropout: float = 0.1) -> list[dict[str, Any]]:
    """The logged numbers of a run whose rows do not fill the last batch."""
    data = write_tasks(folder / "data", {name: 90}, seed=3)
    bert = save_tiny_bert(folder / "bert", "high:learned", positions=128)
    config = BertConfig.from_pretrained(bert)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    config.save_pretrained(bert)
    recipe = recipe_for(name, epochs=2, batch=BATCH, length=128, rate=1e-3)
    finetune(bert, load_task(name, data), folder / "run", seeds=[1], recipe=recipe, notify=pytest.fail)
    lines = RunFolder(folder / "run/seed-1").metrics()
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


class Replays:
    """Stands in for a GPU: results always come into the same memory, of every graph apart."""

    def __init__(self) -> None:
        self.graphs = self.replays = 0

    def __call__(self, _: Any, model: PreTrainedModel) -> Callable[..., Any]:
        return lambda compute: self.capture(compute, [one for one in model.parameters() if one.requires_grad])

    def capture(
        self, compute: Callable[[], Tensor], learning: list[torch.nn.Parameter]
    ) -> tuple[Tensor, Callable[[], object]]:
        self.graphs += 1
        loss, gradients = torch.tensor(torch.nan), [torch.full_like(one, torch.nan) for one in learning]

        def replay() -> None:
            self.replays += 1
            for one in learning:
                one.grad = None
            loss.copy_(compute())
            for one, gradient in zip(learning, gradients, strict=True):
                assert one.grad is not None
                gradient.copy_(one.grad)

        for one, gradient in zip(learning, gradients, strict=True):
            one.grad = gradient
        return loss, replay


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU where there is none")
@pytest.mark.parametrize("name", TASKS)
def test_a_run_learns_the_same_by_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert {ALL[one].kind for one in TASKS} == {spec.kind for spec in ALL.values()}
    launched = tuned(tmp_path / "launched", name)
    replays, shapes = Replays(), set()
    step = GraphedStep.__call__

    def seen(self: GraphedStep, batch: dict[str, Tensor]) -> Tensor:
        shapes.add(tuple(batch["input_ids"].shape))
        return step(self, batch)

    monkeypatch.setattr(trainer, "capture_for", replays)
    monkeypatch.setattr(graphed_step, "WARMUP_STEPS", 1)
    monkeypatch.setattr(GraphedStep, "__call__", seen)
    assert tuned(tmp_path / "replayed", name) == launched
    assert {shape[0] for shape in shapes} == {BATCH}  # not the last, partial one
    assert replays.graphs >= (2 if name == "squad" else 1)  # made-up rows of other tasks are of one length
    assert replays.replays > 8


@on_gpu
@pytest.mark.parametrize("name", TASKS)
def test_a_gpu_learns_the_same_by_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    replayed = tuned(tmp_path / "replayed", name, dropout=0.0)
    monkeypatch.setattr(trainer, "capture_for", lambda *_: None)
    launched = tuned(tmp_path / "launched", name, dropout=0.0)
    assert len(replayed) == len(launched)
    for one, other in zip(replayed, launched, strict=True):
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=0.02)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.1)


@on_gpu
def test_strengths_learn_in_replays_with_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    train = TaskTrainer.train

    def watched(self: TaskTrainer, *arguments: Any, **options: Any) -> Any:
        result = train(self, *arguments, **options)
        assert self.model is not None
        found.extend(bool(one.ne(0).all()) for one in strength_parameters(self.model))
        return result

    monkeypatch.setattr(TaskTrainer, "train", watched)
    lines = tuned(tmp_path, "mrpc")
    assert found == [True, True]
    assert all(torch.tensor(line["loss"]).isfinite() for line in lines if "loss" in line)


def test_batches_without_padding_have_no_mask() -> None:
    ids, padded = torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert set(without_full_mask({"input_ids": ids, "attention_mask": padded})) == {
        "input_ids",
        "attention_mask",
    }
    assert set(without_full_mask({"input_ids": ids, "attention_mask": torch.ones(2, 3)})) == {"input_ids"}


def test_nothing_is_captured_on_a_cpu_or_where_layers_are_skipped_at_random() -> None:
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=8, **shape))
    one_gpu = type("Arguments", (), {"device": torch.device("cuda"), "world_size": 1})()
    on_cpu = type("Arguments", (), {"device": torch.device("cpu"), "world_size": 1})()
    assert capture_for(on_cpu, model) is None
    model.config = BartConfig(encoder_layerdrop=0.1)  # type: ignore[assignment]
    assert capture_for(one_gpu, model) is None

"""Predictions of a fine-tuned model on validation rows, and their scores."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from sklearn import metrics
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from saobp.data.tasks import TaskSpec
from saobp.metrics.health.head_health import Health
from saobp.metrics.health.recorder import Recorder
from saobp.training.finetune.examples import Examples
from saobp.training.finetune.recipe import FinetuneRecipe
from saobp.training.finetune.span import SpanExamples, best_spans

CPU_BATCH = 32
"""Largest batch on a CPU, where more only costs memory."""


def evaluate_rows(
    model: PreTrainedModel, rows: Examples, spec: TaskSpec, recipe: FinetuneRecipe
) -> dict[str, float]:
    """The task's metrics of a model on rows, and the loss except for spans; one device sync at the end."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        metrics = (
            _span_metrics(model, rows, recipe)
            if isinstance(rows, SpanExamples)
            else _label_metrics(model, rows, spec, recipe)
        )
    model.train(was_training)
    return metrics


def measure_attention(
    model: PreTrainedModel, rows: Examples, indices: Sequence[int], statistics: Sequence[str]
) -> Health:
    """Statistics of every head on some rows, in evaluation mode."""
    was_training = model.training
    model.eval()
    recorder = Recorder(model, statistics)
    batch = {name: values.to(model.device) for name, values in rows.__getitems__(indices).items()}
    with torch.no_grad(), recorder.measuring():
        _call(model, batch)
    model.train(was_training)
    return recorder.health.reduced()


def _label_metrics(
    model: PreTrainedModel, rows: Examples, spec: TaskSpec, recipe: FinetuneRecipe
) -> dict[str, float]:
    order, collected = [], []
    for indices, batch in _batches(rows, recipe, model.device):
        batch.pop("labels")
        order.append(indices)
        collected.append(_call(model, batch).logits.float())
    logits = torch.cat(collected).cpu()
    _check_finite(logits)
    positions = np.concatenate(order)
    labels = rows.labels["labels"][positions]
    if spec.kind == "regression":
        guesses = logits[:, 0].numpy()
        loss = functional.mse_loss(logits[:, 0], torch.from_numpy(labels))
    else:
        guesses = logits.argmax(1).numpy()
        loss = functional.cross_entropy(logits, torch.from_numpy(labels))
    return {**score(spec.metrics, guesses, labels), "loss": float(loss)}


def _span_metrics(model: PreTrainedModel, rows: SpanExamples, recipe: FinetuneRecipe) -> dict[str, float]:
    sequences = rows.sequences
    order, collected = [], []
    for indices, batch in _batches(rows, recipe, model.device):
        batch.pop("start_positions"), batch.pop("end_positions")
        output = _call(model, batch)
        begin = torch.from_numpy(sequences.second_offset[indices]).to(model.device)
        size = torch.from_numpy(sequences.second_lengths[indices]).to(model.device)
        positions = torch.arange(output.start_logits.shape[1], device=model.device) - begin[:, None]
        allowed = (positions >= 0) & (positions < size[:, None])
        best = best_spans(output.start_logits, output.end_logits, allowed, recipe.answer)
        order.append(indices)
        collected.append(torch.stack([best[0].double(), best[1].double(), best[2].double()], 1))
    windows = np.concatenate(order)
    predictions = torch.cat(collected).cpu()
    _check_finite(predictions)
    scores, starts, ends = predictions.numpy().T
    texts = rows.texts(windows, starts.astype(np.int64), ends.astype(np.int64))
    best_of: dict[int, tuple[float, int]] = {}
    for index, window in enumerate(windows):
        question = int(rows.example[window])
        if question not in best_of or scores[index] > best_of[question][0]:
            best_of[question] = (float(scores[index]), index)
    answers = [texts[best_of[question][1]] for question in range(len(rows.answers))]
    return span_scores(answers, rows.answers)


def _batches(
    rows: Examples, recipe: FinetuneRecipe, device: torch.device
) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
    """Large batches, the longest rows first."""
    order = np.argsort(-rows.lengths, kind="stable")
    size = recipe.evaluation_batch
    if device.type != "cuda":
        size = min(size, max(1, CPU_BATCH // rows.group))
    for begin in range(0, len(order), size):
        indices = order[begin : begin + size]
        batch = rows.__getitems__(indices.tolist())
        if device.type == "cuda":
            batch = {name: values.pin_memory() for name, values in batch.items()}
        yield indices, {name: values.to(device, non_blocking=True) for name, values in batch.items()}


def _call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16, enabled=uses_bfloat16()):
        return model(**batch)


def uses_bfloat16() -> bool:
    """Whether the GPU supports it; CPUs use float32."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def _check_finite(values: Tensor) -> None:
    if not torch.isfinite(values).all():
        raise ValueError("the model's predictions are not finite: training has diverged; try a lower --rate")


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The named metrics of predicted classes or numbers against labels, both ``[rows]``."""
    return {name: 100.0 * _one(name, predictions, labels) for name in names}


def _one(name: str, predictions: np.ndarray, labels: np.ndarray) -> float:
    if name == "accuracy":
        return float(metrics.accuracy_score(labels, predictions))
    if name == "f1":
        return float(metrics.f1_score(labels, predictions, zero_division=0))
    if name == "matthews":
        return float(metrics.matthews_corrcoef(labels, predictions))
    if name in ("spearman", "pearson"):
        if len(labels) < 2 or np.ptp(predictions) == 0 or np.ptp(labels) == 0:
            return 0.0
        correlation = stats.spearmanr if name == "spearman" else stats.pearsonr
        return float(correlation(predictions, labels)[0])
    raise ValueError(f"unknown metric {name!r}")


def span_scores(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """SQuAD's F1 and exact match: the best over the accepted answers, averaged over questions."""
    pairs = list(zip(predictions, answers, strict=True))
    f1 = [max(token_f1(prediction, answer) for answer in accepted) for prediction, accepted in pairs]
    exact = [max(plain(prediction) == plain(answer) for answer in accepted) for prediction, accepted in pairs]
    return {"f1": 100.0 * float(np.mean(f1)), "exact_match": 100.0 * float(np.mean(exact))}


def plain(text: str) -> str:
    """An answer as SQuAD compares it: lower case, without punctuation, articles and doubled spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of two answers."""
    words, expected = plain(prediction).split(), plain(answer).split()
    common = sum((Counter(words) & Counter(expected)).values())
    if common == 0:
        return 0.0
    return 2 * common / (len(words) + len(expected))

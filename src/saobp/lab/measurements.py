"""Measurements of a pretrained model; each is a file, taken once."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.data.tasks import TASKS, Split, load_split
from saobp.lab.scales import Scale
from saobp.metrics.attention_inputs import inputs_of
from saobp.metrics.diagnosis.diagnose import check_weights
from saobp.metrics.functional.gtd import BETA, HOPS
from saobp.metrics.health.head_health import CROSS_LAYER
from saobp.metrics.health.recorder import Recorder
from saobp.metrics.query_key_statistics import STATISTICS, measure_heads
from saobp.timing import captured, clock_of
from saobp.training.checkpoints import model_checksum
from saobp.training.evaluation.perplexity import causal_perplexity, read_wikitext
from saobp.training.evaluation.run import evaluate, load_language_model
from saobp.training.evaluation.zero_shot import accuracy, boolq_questions, race_questions
from saobp.transformers.capture import AttentionCall, watch

MAP_TOKENS = 120
"""As in the paper's sparsity maps."""
COST_SHAPE = (32, 128)

Taken = dict[str, Any]


def take_measurement(measure: str, model: Path, scale: Scale, length: int, data_dir: Path | None) -> Taken:
    """One measurement of a saved model that was pretrained on texts of ``length`` tokens, as JSON."""
    began = time.monotonic()
    taken = MEASURES[measure](model, scale, length, data_dir)
    return {"measure": measure, "model": model_checksum(model), "seconds": time.monotonic() - began, **taken}


def on_texts(task: str) -> Callable[[Path, Scale, int, Path | None], Taken]:
    """Statistics of every head on the validation texts of a task."""

    def measured(model: Path, scale: Scale, length: int, data_dir: Path | None) -> Taken:
        loaded, tokenizer, _ = load_language_model(model)
        split = load_split(TASKS[task], "validation", data_dir).sample(scale.texts)
        found = measure_texts(loaded, tokenizer, texts_of(split, task), length=min(scale.length, length))
        return {"task": task, "data": {task: split.checksum}, **found}

    return measured


def texts_of(split: Split, task: str) -> list[str]:
    """The texts of a task's rows, columns joined."""
    columns = [split.column(name) for name in TASKS[task].texts]
    return [" ".join(parts) for parts in zip(*columns, strict=True)]


def wikitext(model: Path, scale: Scale, length: int, data_dir: Path | None) -> Taken:
    """Pseudo- and masked perplexity of an encoder on WikiText-2."""
    found = evaluate(
        model,
        ("wikitext",),
        data_dir=data_dir,
        length=length,
        positions=scale.positions,
        limit=6 if scale.name == "smoke" else None,
    )
    return {"data": {"wikitext": found["wikitext"]["checksum"]}, **found["wikitext"]}


def zero_shot(model: Path, scale: Scale, length: int, data_dir: Path | None) -> Taken:
    """Perplexity of a decoder on WikiText-2 and its answers on RACE-Middle and BoolQ.

    Windows and prompts have the length of pretraining: later positions are untrained.
    At the smoke scale that is shorter than some answers, so prompts use all positions there.
    """
    loaded, tokenizer, is_decoder = load_language_model(model)
    if not is_decoder:
        raise ValueError(f"{model} is an encoder; zero-shot questions are asked of decoders")
    if scale.name != "smoke":
        loaded.config.max_position_embeddings = length
    text = read_wikitext(tokenizer, data_dir)
    race, boolq = (
        load_split(TASKS[task], split, data_dir).sample(scale.rows)
        for task, split in (("race-middle", "test"), ("boolq", "validation"))
    )
    perplexity = causal_perplexity(loaded, text.row, length=length)
    return {
        "data": {"wikitext": text.checksum, "race-middle": race.checksum, "boolq": boolq.checksum},
        "wikitext": {**perplexity, "word_perplexity": math.exp(min(perplexity["nats"] / text.words, 700))},
        "race-middle": accuracy(loaded, tokenizer, race_questions(race, every=True)),
        "boolq": accuracy(loaded, tokenizer, boolq_questions(boolq)),
    }


def leak(model: Path, scale: Scale, length: int, data_dir: Path | None) -> Taken:
    """Causality check: change of the first half's hidden states when the second half is replaced."""
    del scale
    loaded, tokenizer, _ = load_language_model(model)
    row = read_wikitext(tokenizer, data_dir).row
    count = min(32, len(row) // length - 1)
    ids = torch.from_numpy(row[: (count + 1) * length].reshape(count + 1, length).copy()).to(loaded.device)
    here, other, half = ids[:-1], ids[1:], length // 2
    changed = torch.cat([here[:, :half], other[:, half:]], 1)
    with torch.no_grad():
        before, after = (
            loaded.base_model(input_ids=one).last_hidden_state[:, :half] for one in (here, changed)
        )
    moved = (after - before).norm() / before.norm()
    return {"moved": float(moved), "texts": count, "length": length}


def maps(model: Path, scale: Scale, length: int, data_dir: Path | None) -> Taken:
    """The last layer's attention maps of one SQuAD text, with and without refinement."""
    del scale
    loaded, tokenizer, _ = load_language_model(model)
    split = load_split(TASKS["squad"], "validation", data_dir)
    text = max(split.column("context")[:50], key=len)
    encoded = tokenizer(text, truncation=True, max_length=min(MAP_TOKENS, length), return_tensors="pt")
    rows = last_layer(loaded, encoded["input_ids"])
    names = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist())
    packed = {
        name: {
            "shape": list(one.shape),
            "float16": base64.b64encode(one.half().numpy().tobytes()).decode(),
        }
        for name, one in rows.items()
    }
    return {"data": {"squad": split.checksum}, "tokens": names, **packed}


def last_layer(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """``after``: refined; ``before``: softmax of the same scores; ``[heads, length, length]``."""
    found: list[dict[str, Tensor]] = []

    def keep(call: AttentionCall) -> None:
        heads = inputs_of(call)
        assert heads is not None
        scores, graph = heads.scores()
        before = torch.softmax(graph.mask_scores(scores), -1)
        found.append({"before": before[0].cpu(), "after": heads.maps().rows[0].cpu()})

    model.eval()
    with torch.no_grad(), watch(model, keep):
        model(input_ids=ids.to(model.device))
    return found[-1]


def cost(model: Path, scale: Scale, length: int, data_dir: Path | None) -> Taken:
    """Milliseconds of a forward pass of 32 x 128 tokens; on a GPU in bfloat16, also as a CUDA graph."""
    del data_dir, length
    loaded, tokenizer, _ = load_language_model(model)
    shape = (4, 32) if scale.name == "smoke" else COST_SHAPE
    ids = torch.randint(len(tokenizer), shape, generator=torch.Generator().manual_seed(0)).to(loaded.device)
    body = loaded.base_model
    cuda = loaded.device.type == "cuda"
    if cuda:
        body = body.bfloat16()
    call = _forward(torch.compile(body, dynamic=False) if cuda else body, ids)
    for _ in range(3):
        call()
    clock = clock_of("cuda" if cuda else "cpu")
    turns = 3 if scale.name == "smoke" else 101
    taken: Taken = {
        "shape": list(shape),
        "milliseconds": float(np.median([clock(call, 1) for _ in range(turns)])),
    }
    if cuda:
        replay = captured(call)
        taken["graph_milliseconds"] = float(np.median([clock(replay, 10) for _ in range(turns)]))
    return taken


def _forward(body: Callable[..., Any], ids: Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return body(input_ids=ids)

    return call


def unpacked(taken: Taken) -> np.ndarray:
    """Decode a map of ``maps``, ``[heads, length, length]``."""
    raw = np.frombuffer(base64.b64decode(taken["float16"]), dtype=np.float16)
    return raw.reshape(taken["shape"]).astype(np.float32)


TIMED_ALONE = ("cost",)
"""Timings, taken while no other process of the lab runs."""
MEASURES: dict[str, Callable[[Path, Scale, int, Path | None], Taken]] = {
    "race-middle": on_texts("race-middle"),
    "squad": on_texts("squad"),
    "sst2": on_texts("sst2"),
    "wikitext": wikitext,
    "zero-shot": zero_shot,
    "leak": leak,
    "maps": maps,
    "cost": cost,
}


TEXTS_AT_ONCE = 32
POINTS = 1500
"""(text, head) pairs saved for scatter plots, evenly sampled."""
POINT_STATISTICS = ("gtd", "clustering", "betweenness")


def measure_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, length: int
) -> dict[str, Any]:
    """Statistics of every head on texts cut to ``length`` tokens, JSON-serialisable.

    ``layers`` has for each statistic and layer the mean of each head, ``points`` (text, head) pairs.
    """
    check_weights(model, "the model")
    device = next(model.parameters()).device
    found: dict[str, list[dict[str, Tensor]]] = {}
    recorder = Recorder(model, ("gtd", CROSS_LAYER))
    tokens = 0

    def keep(call: AttentionCall) -> None:
        heads = inputs_of(call)
        assert heads is not None
        measured = measure_heads(heads, "exact", STATISTICS, beta=BETA, hops=HOPS)
        own = {name: estimate.value.double().cpu() for name, estimate in measured.items()}
        found.setdefault(call.name, []).append(own)

    model.eval()
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        batch = _encoded(tokenizer, texts[start : start + TEXTS_AT_ONCE], length)
        tokens += int(batch["attention_mask"].sum())
        with torch.no_grad(), watch(model, keep):
            model(**{name: part.to(device) for name, part in batch.items()})
        with torch.no_grad(), recorder.measuring():
            model(**{name: part.to(device) for name, part in batch.items()})
    joined = [
        {name: torch.cat([part[name] for part in parts]) for name in STATISTICS} for parts in found.values()
    ]
    return {
        "texts": len(texts),
        "tokens": tokens,
        "length": length,
        "names": list(found),
        "layers": {name: [layer[name].mean(0).tolist() for layer in joined] for name in STATISTICS},
        CROSS_LAYER: list(recorder.health.cross_layer_gtd().values()),
        "points": _points(joined),
    }


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> dict[str, Tensor]:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(list(texts), truncation=True, max_length=length, padding=True, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _points(layers: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Pairs spread evenly over layers, heads and texts, with their layer."""
    grids = {name: torch.stack([layer[name] for layer in layers]) for name in POINT_STATISTICS}
    shape = grids["gtd"].shape
    total = grids["gtd"].numel()
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:POINTS].sort().values
    per_layer = shape[1] * shape[2]
    return [
        {
            "layer": int(place) // per_layer,
            **{name: round(float(grid.flatten()[place]), 5) for name, grid in grids.items()},
        }
        for place in chosen
    ]

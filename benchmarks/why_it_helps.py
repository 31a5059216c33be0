"""Where a trained model differs from Original: losses by kind of token, heads switched off, statistics.

    python benchmarks/why_it_helps.py runs/original runs/learned runs/key-bias --tokens TOKENS --out why.json

The first run is the base; all are runs of ``saobp pretrain`` on the same texts with their models. For every
run: the mean difference of held-out losses from the base, in nats, by frequency, repetition, position and
distance to the next masked token; the rise of the loss when the numbers per head (strengths, temperatures)
are set to 0, together, by kind, layer and head; GTD, entropy and sink mass of every head with and without
them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForMaskedLM, PreTrainedModel

from saobp.metrics.health.recorder import Recorder
from saobp.training.batches import BatchShard, held_out_batches
from saobp.training.dataset import PretrainingData, data_of
from saobp.training.objectives import MaskedLM
from saobp.training.recipes import PretrainRecipe
from saobp.transformers.layer_refinement import named_strengths

STATISTICS = ("gtd", "attention_entropy", "sink_mass", "indirect_entropy")
COUNTED_ROWS = 40_000
"""Training rows in which the frequency of tokens is counted."""
MEASURED_TEXTS, ABLATION_BATCHES = 128, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--vocabulary", type=int, help="size of the tokenizer that was trained for the runs")
    parser.add_argument("--out", type=Path, default=Path("why.json"))
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = recipe_of(given.runs[0])
    texts = data_of(recipe, given.tokens, vocabulary=given.vocabulary)
    assert texts.validation is not None
    batches = held_out_batches(texts.validation, BatchShard(recipe, 0, 1, device))
    objective = MaskedLM.of(texts.tokenizer)
    kinds = kinds_of_tokens(objective, batches, texts)
    base: Tensor | None = None
    found: dict[str, Any] = {"base": given.runs[0].name, "runs": {}}
    for folder in given.runs:
        model = AutoModelForMaskedLM.from_pretrained(folder / "model").to(device).eval()
        losses = token_losses(model, objective, batches)
        base = losses if base is None else base
        found["runs"][folder.name] = {
            "refinement": getattr(model.config, "saobp", None),
            "loss": losses.mean().item(),
            "numbers": {name: values.tolist() for name, values in named_strengths(model).items()},
            "by_kind": {name: by_class(losses - base, base, kind) for name, kind in kinds.items()},
            "set_to_zero": set_to_zero(model, objective, batches),
            "statistics": statistics(model, batches, objective),
        }
        given.out.write_text(json.dumps(found))
        print(folder.name, f"{losses.mean().item():.4f}", flush=True)


def recipe_of(run: Path) -> PretrainRecipe:
    return PretrainRecipe.from_dict(json.loads((run / "recipe.json").read_text()))


@torch.no_grad()
def token_losses(model: PreTrainedModel, objective: MaskedLM, batches: list[dict[str, Tensor]]) -> Tensor:
    """Loss of every predicted token, ``[rows, predicted]``."""
    found = []
    for batch in batches:
        shown, places, targets = objective.hide(batch["input_ids"], batch["seeds"])
        with torch.autocast(shown.device.type, torch.bfloat16, enabled=shown.device.type == "cuda"):
            hidden = model.base_model(input_ids=shown).last_hidden_state
            picked = hidden.gather(1, places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
            scores = model.decoder(model.head(picked))
        losses = functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="none")
        found.append(losses.view_as(targets))
    return torch.cat(found)


def kinds_of_tokens(
    objective: MaskedLM, batches: list[dict[str, Tensor]], texts: PretrainingData
) -> dict[str, dict[str, Tensor]]:
    """Classes of the predicted tokens by several criteria: bool ``[rows, predicted]`` each."""
    counts = torch.zeros(objective.vocabulary, dtype=torch.long)
    for start in range(0, min(COUNTED_ROWS, len(texts.train)), 4000):
        rows = texts.train.at(np.arange(start, min(start + 4000, COUNTED_ROWS, len(texts.train))))
        counts += torch.bincount(rows["input_ids"].flatten().long(), minlength=objective.vocabulary)
    share = counts / counts.sum()
    hidden = [(batch, *objective.hide(batch["input_ids"], batch["seeds"])) for batch in batches]
    targets = torch.cat([one[3] for one in hidden])
    places = torch.cat([one[2] for one in hidden])
    shown = torch.cat([one[1] for one in hidden])
    frequency = share.to(targets.device)[targets]
    elsewhere = (shown.unsqueeze(1) == targets.unsqueeze(2)) & (
        torch.arange(shown.shape[1], device=shown.device) != places.unsqueeze(2)
    )
    content = frequency < 1e-3
    apart = (places.unsqueeze(2) - places.unsqueeze(1)).abs()
    apart = apart.masked_fill(torch.eye(places.shape[1], dtype=torch.bool, device=apart.device), 10**6)
    nearest, replaced = apart.min(-1).values, shown.gather(1, places)
    length = shown.shape[1]
    return {
        "frequency": {
            "above 1 %": frequency >= 1e-2,
            "0.1 to 1 %": (frequency >= 1e-3) & (frequency < 1e-2),
            "0.01 to 0.1 %": (frequency >= 1e-4) & (frequency < 1e-3),
            "0.001 to 0.01 %": (frequency >= 1e-5) & (frequency < 1e-4),
            "below 0.001 %": frequency < 1e-5,
        },
        "repetition": {
            "rarer than 0.1 %, seen elsewhere in the row": elsewhere.any(-1) & content,
            "rarer than 0.1 %, not seen elsewhere": ~elsewhere.any(-1) & content,
            "others": ~content,
        },
        "position": {
            f"{start} to {start + length // 4 - 1}": (places >= start) & (places < start + length // 4)
            for start in range(0, length // 4 * 4, length // 4)
        },
        "next masked token": {
            "beside it": nearest == 1,
            "2 away": nearest == 2,
            "3 or 4 away": (nearest >= 3) & (nearest <= 4),
            "farther": nearest > 4,
        },
        "shown as": {
            "mask": replaced == objective.mask,
            "itself": replaced == targets,
            "another token": (replaced != objective.mask) & (replaced != targets),
        },
    }


def by_class(difference: Tensor, base: Tensor, classes: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Mean difference of each class and its standard error over rows, with the base's mean and the count."""
    found = {}
    for name, chosen in classes.items():
        count = int(chosen.sum())
        if not count:
            continue
        mean = (difference * chosen).sum() / count
        residual = ((difference - mean) * chosen).sum(1)  # rows are independent, tokens of a row are not
        found[name] = {
            "tokens": count,
            "base": float((base * chosen).sum() / count),
            "difference": float(mean),
            "error": float(residual.square().sum().sqrt() / count),
        }
    return found


@contextmanager
def zeroed(parameters: list[Tensor]) -> Iterator[None]:
    """Context in which these (parts of) parameters are 0."""
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
        yield
        for parameter, before in zip(parameters, kept, strict=True):
            parameter.copy_(before)


def set_to_zero(
    model: PreTrainedModel, objective: MaskedLM, batches: list[dict[str, Tensor]]
) -> dict[str, Any]:
    """Rise of the loss when numbers per head are 0: all, those of a kind, of a layer, of a head."""
    numbers = {name: parameter.data for name, parameter in named_strengths(model).items()}
    if not numbers:
        return {}
    few = batches[:ABLATION_BATCHES]
    loss: Callable[[list[dict[str, Tensor]]], float] = lambda some: (  # noqa: E731
        token_losses(model, objective, some).mean().item()
    )
    usual, usual_few = loss(batches), loss(few)
    with zeroed(list(numbers.values())):
        found: dict[str, Any] = {"all": loss(batches) - usual}
    found["kinds"] = {}
    for kind in sorted({name.partition(".")[2] for name in numbers}):
        with zeroed([parameter for name, parameter in numbers.items() if name.partition(".")[2] == kind]):
            found["kinds"][kind] = loss(batches) - usual
    layers = sorted({int(name.partition(".")[0]) for name in numbers})
    own = {layer: [p for name, p in numbers.items() if name.startswith(f"{layer}.")] for layer in layers}
    found["layers"], found["heads"] = [], []
    for layer in layers:
        with zeroed(own[layer]):
            found["layers"].append(loss(batches) - usual)
        heads = []
        for head in range(len(own[layer][0])):
            with zeroed([parameter[head : head + 1] for parameter in own[layer]]):
                heads.append(loss(few) - usual_few)
        found["heads"].append(heads)
    return found


@torch.no_grad()
def statistics(
    model: PreTrainedModel, batches: list[dict[str, Tensor]], objective: MaskedLM
) -> dict[str, dict[str, list[list[float]]]]:
    """Statistics of every head as it is and with its numbers set to 0."""
    shown = objective.hide(batches[0]["input_ids"], batches[0]["seeds"])[0][:MEASURED_TEXTS]
    found = {}
    for name, parameters in (
        ("as it is", []),
        ("set to 0", [p.data for p in named_strengths(model).values()]),
    ):
        recorder = Recorder(model, STATISTICS, "exact")
        with zeroed(parameters), recorder.measuring():
            model(input_ids=shown)
        found[name] = {
            statistic: [heads.tolist() for heads in recorder.health.values(statistic).values()]
            for statistic in STATISTICS
        }
    return found


if __name__ == "__main__":
    main()

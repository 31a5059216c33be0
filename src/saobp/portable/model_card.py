"""The model card of a saved model: README.md with metadata for the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from saobp.portable.code import classes_of
from saobp.portable.run_summary import CardResult, RunSummary
from saobp.refinement import Refinement
from saobp.transformers.layer_refinement import named_refinements

PIPELINES = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModel": "feature-extraction",
}
FACTORS = {
    "high": "repulsive: rows are pushed away from keys that other rows attend to",
    "low": "attractive: rows are drawn to keys that other rows attend to",
    "elemmul": "rows attend to tokens whose rows resemble theirs",
}


SIGNATURE = "\n<!-- saobp wrote the text above: "
"""A comment at the end of a card, with a checksum by which an edited one is known."""


def signed(card: str) -> str:
    return f"{card}{SIGNATURE}{hashlib.sha256(card.encode()).hexdigest()} -->\n"


def is_untouched(text: str) -> bool:
    """Whether a text is a signed card that nobody has edited."""
    return text == signed(text.partition(SIGNATURE)[0])


def card_for(
    model: PreTrainedModel, refinement: Refinement, run: RunSummary, name: str, *, portable: bool
) -> str:
    """The text of the card; ``name`` is the folder's."""
    known = dict(classes_of(model.config))
    auto = next((auto for auto in PIPELINES if known.get(auto) == type(model).__name__), None)
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=PIPELINES.get(auto or ""),
        tags=["saobp", "refined-attention", *(["custom_code"] if portable else [])],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---\n",
        f"# {name}\n",
        f"A {type(model).__name__} of {model.num_parameters():,} parameters whose self-attention is refined "
        "by belief propagation (saobp).\n",
        "## Refinement\n",
        _refinement(model, refinement, run),
        "## Training\n",
        _table(("", ""), list(run.training.items())) or "How it was trained is not recorded here.\n",
        "## Results\n",
        _results(run.results),
        "## How to load it\n",
        _loading(auto or "AutoModel", portable),
        "## Limits\n",
        _limits(model, refinement, portable),
    ]
    return "\n".join(parts)


def _refinement(model: PreTrainedModel, refinement: Refinement, run: RunSummary) -> str:
    words = FACTORS.get(refinement.factor.partition("-")[0], "plain softmax" if refinement.is_plain else "")
    rows: list[tuple[str, Any]] = [
        ("in text form", f"`{refinement}`"),
        ("factor", f"`{refinement.factor}`" + (f" ({words})" if words else "")),
    ]
    if refinement.is_learned:
        values = (
            run.strengths or torch.cat([strengths() for _, strengths in named_refinements(model)]).tolist()
        )
        spread = f"{min(values):.3g} to {max(values):.3g}, mean {sum(values) / len(values):.3g}"
        rows.append(("strength", f"learned, one number per head, in the weights: {spread}"))
    elif refinement.factor.startswith(("high", "low")):
        strongest = refinement.strongest
        number = (
            f"{refinement.strength:g}" if isinstance(refinement.strength, float) else f"up to {strongest:g}"
        )
        rows.append(("strength", f"{number}, fixed, in `config.json`"))
    rows.append(("steps", refinement.steps))
    if refinement.variants:
        rows.append(("variants", ", ".join(refinement.variants)))
    return _table(("", ""), rows)


def _results(results: Sequence[CardResult]) -> str:
    if not results:
        return "No result is recorded here.\n"
    rows = []
    for result in results:
        low, high = result.interval or (None, None)
        interval = "not known" if low is None else f"{low:.4g} to {high:.4g}"
        rows.append((result.name, f"{result.value:.4g}", interval, result.note))
    return _table(("", "value", "95 % interval", "measured on"), rows)


def _loading(auto: str, portable: bool) -> str:
    with_package = (
        "`FOLDER` stands for the path of this folder, or its name on the hub. With the package saobp "
        "installed, which is faster and has kernels for GPUs:\n\n```python\n"
        f'import saobp\nfrom transformers import {auto}\n\nmodel = saobp.load("FOLDER", {auto})\n```\n'
    )
    if portable:
        return (
            f"{with_package}\nWithout it, by `modeling_saobp.py` in this folder, plain PyTorch:\n\n"
            f"```python\nfrom transformers import {auto}\n\n"
            f'model = {auto}.from_pretrained("FOLDER", trust_remote_code=True)\n```\n'
        )
    return (
        f"{with_package}\nWithout it the model does not load: `config.json` asks for an attention "
        "implementation that Transformers alone does not know.\n"
    )


def _limits(model: PreTrainedModel, refinement: Refinement, portable: bool) -> str:
    lines = [
        "The weights belong to a model with refined attention; a plain one of them gives other results. "
        "Transformers from 5.5 on refuses to make one, unless an attention implementation is passed "
        "(`None` included, as `transformers serve` does): then it only logs the strengths as unexpected "
        "weights. Older versions, and programs with model code of their own such as vLLM, do not notice.",
        "What the training texts say, the model may repeat; nothing was filtered or aligned by saobp.",
    ]
    if portable:
        lines.append(
            "The code in this folder is written for Transformers 5.17 and newer and computes the whole "
            "attention map in memory. It caches by a DynamicCache; static caches and assisted decoding need "
            "the package."
        )
    if model.can_generate() and refinement.factor.startswith(("elemmul", "sinkhorn")):
        lines.append("It generates with `use_cache=False` only: its rows need all other rows.")
    return "".join(f"- {line}\n" for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    cells = [head, ["---"] * len(head), *rows]
    return "".join(
        f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |\n" for row in cells
    )

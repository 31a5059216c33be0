"""Save a refined model to be sent to others: weights, tokenizer, model card, and the code that it needs.

The card is README.md with metadata for the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.portable.code import add_code, check_portable, classes_of, refinement_of, weights_of
from saobp.portable.run_facts import CardResult, RunFacts, checked_results, facts_of_folder
from saobp.refinement import Refinement
from saobp.storage.atomic import replacing
from saobp.storage.manifest import CARD
from saobp.transformers.layer_refinement import CONFIG_FIELD, named_refinements


def save(
    model: PreTrainedModel,
    folder: str | PathLike[str],
    *,
    portable: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    run: str | PathLike[str] | None = None,
    results: Sequence[CardResult] = (),
) -> Path:
    """Save a refined model to a new folder, with a model card.

    portable:  also write the modelling code, so that the model loads where saobp is not installed, with
               ``trust_remote_code=True``
    run:       the folder of the run that trained the model, for the card
    results:   other numbers for the card, each ``(name, value, (low, high) or None, what it is measured on)``
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"saobp.save takes a Transformers model, not {type(model).__name__}: give it the model inside"
        )
    path = Path(folder)
    if path.exists():
        raise FileExistsError(f"{str(path)!r} exists already: name a folder that does not")
    if refinement_of(model) is None:
        raise ValueError("the model is not refined: save it with model.save_pretrained(folder)")
    if getattr(model.config, CONFIG_FIELD, None) is None:
        raise ValueError(
            "only a part of the model is refined, so it would load as a plain one: apply the refinement to "
            "the whole model, or save that part by itself"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise TypeError(
            f"tokenizer must be what AutoTokenizer.from_pretrained gives, not {type(tokenizer).__name__}"
        )
    if portable:
        check_portable(model)
    facts = RunFacts() if run is None else facts_of_folder(run)
    facts = replace(facts, results=(*facts.results, *checked_results(results)))
    with replacing(path) as new:
        model.save_pretrained(new, state_dict=weights_of(model))
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        finish_folder(model, new, path.name, facts, portable=portable)
    return path


def finish_folder(
    model: PreTrainedModel, folder: Path, name: str, facts: RunFacts, *, portable: bool
) -> None:
    """Add the card and, if asked for, the code to a folder that the model was saved in."""
    refinement = refinement_of(model)
    if refinement is None:
        return
    if portable:
        add_code(model, folder)
    text = card_for(model, refinement, facts, name, portable=portable)
    (folder / CARD).write_text(text, encoding="utf-8")


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


def card_for(
    model: PreTrainedModel, refinement: Refinement, facts: RunFacts, name: str, *, portable: bool
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
        _refinement(model, refinement, facts),
        "## Training\n",
        _table(("", ""), list(facts.training.items())) or "How it was trained is not recorded here.\n",
        "## Results\n",
        _results(facts.results),
        "## How to load it\n",
        _loading(auto or "AutoModel", portable),
        "## Limits\n",
        _limits(model, refinement, portable),
    ]
    return "\n".join(parts)


def _refinement(model: PreTrainedModel, refinement: Refinement, facts: RunFacts) -> str:
    words = FACTORS.get(refinement.factor.partition("-")[0], "plain softmax" if refinement.is_plain else "")
    rows: list[tuple[str, Any]] = [
        ("in text form", f"`{refinement}`"),
        ("factor", f"`{refinement.factor}`" + (f" ({words})" if words else "")),
    ]
    if refinement.is_learned:
        values = (
            facts.strengths or torch.cat([strengths() for _, strengths in named_refinements(model)]).tolist()
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

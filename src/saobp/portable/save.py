"""Save a refined model to be sent to others: weights, tokenizer, model card, and the code that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.portable.card import card_for
from saobp.portable.code import add_code, check_portable, refinement_of, weights_of
from saobp.portable.run_facts import CardResult, RunFacts, facts_of_folder
from saobp.storage.atomic import replacing
from saobp.storage.manifest import CARD


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
    if portable:
        check_portable(model)
    facts = RunFacts() if run is None else facts_of_folder(run)
    facts = replace(facts, results=(*facts.results, *(CardResult(*result) for result in results)))
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

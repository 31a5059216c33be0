"""Save a refined model to be sent to others: weights, tokenizer, model card, and the code that it needs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.portable.code import add_code, check_portable, refinement_of, weights_of
from saobp.portable.model_card import card_for, is_untouched, signed
from saobp.portable.run_summary import CardResult, RunSummary, checked_results, summarise_run_folder
from saobp.storage.atomic import adding_to, replacing
from saobp.storage.locks import one_at_a_time
from saobp.storage.manifest import CARD, MANIFEST, write_manifest
from saobp.storage.places import check_can_write
from saobp.transformers.adapters import has_adapter
from saobp.transformers.layer_refinement import CONFIG_FIELD

CONFIG = "config.json"
WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin*")
"""Names under which Transformers looks for weights, whole or in parts; earlier ones it might prefer."""
ADAPTER = "adapter_config.json"
"""The file by which Transformers finds an adapter."""
NEW_CARD = "README-new.md"
"""The card where the folder has another README.md, which stays."""


def save(
    model: PreTrainedModel,
    folder: str | PathLike[str],
    *,
    portable: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    run: str | PathLike[str] | None = None,
    results: Sequence[CardResult] = (),
) -> Path:
    """Save a refined model to a folder, with a model card.

    A folder that exists gets the new files in place of those of the same names, once all are written; others
    stay, and so does a ``README.md`` that is no card as written here. So a call before a long training tells
    whether the trained model can be saved.
    portable:  also write the modelling code, so that the model loads where saobp is not installed, with
               ``trust_remote_code=True``
    run:       the folder of the run that trained the model, for the card
    results:   other numbers for the card, each ``(name, value, (low, high) or None, what it is measured on)``
    """
    if isinstance(model, nn.Module) and has_adapter(model):
        raise ValueError(
            "the model has an adapter (PEFT): save what model.merge_and_unload() returns, or the adapter "
            "alone with model.save_pretrained(folder)"
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"saobp.save takes a Transformers model, not {type(model).__name__}: give it the model inside"
        )
    if not str(folder):
        raise ValueError("name a folder, which is an empty text here")
    path = Path(folder)
    check_can_write(path)
    _check_no_adapter(path)
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
    summary = RunSummary() if run is None else summarise_run_folder(run)
    summary = replace(summary, results=(*summary.results, *checked_results(results)))
    with one_at_a_time(path):
        there = path.is_dir()
        with adding_to(path, WEIGHTS, last=CONFIG) if there else replacing(path.resolve()) as new:
            model.save_pretrained(new, state_dict=weights_of(model))
            if tokenizer is not None:
                tokenizer.save_pretrained(new)
            finish_folder(model, new, path.resolve().name, summary, portable=portable)
            _keep_edited_card(path, new)
        if (path / MANIFEST).exists():
            write_manifest(path)
    return path


def _check_no_adapter(folder: Path) -> None:
    """Raise if a folder holds an adapter (PEFT), which Transformers would add to the saved model."""
    if (folder / ADAPTER).exists():
        raise ValueError(
            f"{str(folder)!r} holds an adapter ({ADAPTER}), which would be added to the model when that is "
            "loaded: name another folder"
        )


def _keep_edited_card(folder: Path, new: Path) -> None:
    """Give the new card another name if the folder has a README.md that somebody wrote or edited."""
    card = folder / CARD
    if card.exists() and not is_untouched(card.read_text(encoding="utf-8", errors="replace")):
        (new / CARD).rename(new / NEW_CARD)
        warnings.warn(
            f"{card} was written or edited by hand, so it stays, and the new model card is {NEW_CARD} "
            "beside it",
            stacklevel=3,
        )


def finish_folder(
    model: PreTrainedModel, folder: Path, name: str, run: RunSummary, *, portable: bool
) -> None:
    """Add the card and, if ``portable``, the code to a folder in which the model was saved."""
    refinement = refinement_of(model)
    if refinement is None:
        return
    if portable:
        add_code(model, folder)
    text = card_for(model, refinement, run, name, portable=portable)
    (folder / CARD).write_text(signed(text), encoding="utf-8")

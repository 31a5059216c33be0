"""Pretraining data by name: raw texts, tokenised on demand, or existing token stores."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from saobp.data import Blocks, TokenStore, load_tokenizer, parse_mixture, prefix_of, prepare_corpora
from saobp.data.token_store import METADATA, Progress
from saobp.data.tokenizer_store import (
    named_tokenizer,
    save_family_tokenizer,
    size_to_train,
    tokenizer_family,
    tokenizer_path,
    trained_sizes,
    trained_tokenizer,
)
from saobp.data.tokenizers import tokenizer_checksum
from saobp.sizes import DECODERS
from saobp.storage.atomic import is_unfinished
from saobp.training.objectives import MaskedLM
from saobp.training.recipes import PretrainRecipe

_HUB = re.compile(r"[\w.-]+/[\w.-]+$")
"""Name of a dataset on the hub."""


@dataclass(frozen=True)
class PretrainingData:
    """Data of a run; without a held-out share there is no validation set."""

    train: Blocks
    validation: Blocks | None
    tokenizer: PreTrainedTokenizerFast


def find_pretraining_data(
    family: str,
    corpus: str,
    *,
    length: int,
    seed: int,
    tokens: str | Path,
    data_dir: str | Path | None = None,
    tokenizer: str | None = None,
    vocabulary: int | None = None,
    held_out: float = 0.01,
    progress: Callable[[str], Progress] | None = None,
) -> PretrainingData:
    """Rows of a mixture such as ``"wikipedia_en:0.6,gutenberg_books:0.4"``.

    tokens:     folder of token stores; a corpus that can be found as text is tokenised there once, another
                must be there already. The tokenizer is saved there too
    corpus:     empty for all stores in that folder
    tokenizer:  a name or folder; by default the one in ``tokens``, else the family's own
    vocabulary: learn one of this size from the corpus instead; ``tokenizer="train:SIZE"`` says the same
    progress: maps a description to a progress callback
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ValueError(f"the data folder {data_dir} does not exist: check --data-dir")
    folder = Path(tokens)
    mixture = parse_mixture(corpus) if corpus else {}
    raw = _corpora_to_tokenise(mixture, folder, data_dir)
    loaded = find_tokenizer(
        family, folder, raw, data_dir=data_dir, tokenizer=tokenizer, vocabulary=vocabulary, progress=progress
    )
    if family not in DECODERS:
        MaskedLM.of(loaded)
    new_stores = prepare_corpora(raw, loaded, folder, data_dir=data_dir, progress=progress) if raw else {}
    stores = _with_saved_stores(new_stores, mixture, folder, loaded)
    weights = mixture if any(weight is not None for weight in mixture.values()) else None
    blocks = partial(
        Blocks,
        stores,
        weights,
        length=length,
        seed=seed,
        held_out=held_out,
        prefix=None if family in DECODERS else prefix_of(loaded),
    )
    return PretrainingData(blocks(split="train"), blocks(split="validation") if held_out else None, loaded)


def data_of(recipe: PretrainRecipe, tokens: str | Path, **options: Any) -> PretrainingData:
    """:func:`find_pretraining_data` for a recipe."""
    return find_pretraining_data(
        recipe.family, recipe.corpus, length=recipe.length, seed=recipe.seed, tokens=tokens, **options
    )


def _corpora_to_tokenise(
    mixture: Mapping[str, float | None], folder: Path, data_dir: str | Path | None
) -> list[str]:
    """Corpora that are found as text. Raises on one that is neither text nor a token store in the folder."""
    saved = {store.metadata.corpus for store in stores_in(folder)}
    if not mixture and not saved:
        raise ValueError(f"{folder} holds no token store: name texts by --corpus")
    raw = [name for name in mixture if _is_text(name, data_dir) or (name not in saved and _HUB.match(name))]
    for name in mixture:
        if name not in raw and name not in saved:
            raise ValueError(
                f"there is no text {name!r}"
                + ("" if data_dir is None else f" in {data_dir}")
                + f" and no token store of it in {folder}: check --corpus, --data-dir and --tokens"
            )
    return raw


def _with_saved_stores(
    new_stores: Mapping[str, TokenStore],
    mixture: Mapping[str, float | None],
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, TokenStore]:
    """The stores of a mixture, or all of the folder without one: new ones, and saved ones, verified."""
    saved = ready_stores(folder, tokenizer)
    for name in mixture:
        if name not in new_stores and name not in saved:
            raise ValueError(
                f"the tokens of {name} in {folder} come from another tokenizer: name it by --tokenizer"
            )
    stores = {name: new_stores.get(name) or saved[name] for name in mixture} if mixture else saved
    if not stores:
        raise ValueError(f"{folder} holds no token store for this tokenizer: name texts by --corpus")
    for name in stores.keys() - new_stores.keys():
        stores[name].verify()
    return stores


def find_tokenizer(
    family: str,
    folder: Path,
    raw: list[str],
    *,
    data_dir: str | Path | None,
    tokenizer: str | None,
    vocabulary: int | None,
    progress: Callable[[str], Progress] | None = None,
) -> PreTrainedTokenizerFast:
    """The tokenizer asked for, else the saved one, else the family's; saved with the tokens."""
    if tokenizer is not None and vocabulary is not None:
        raise ValueError("give a tokenizer or the size of a vocabulary to learn, not both")
    size = vocabulary if tokenizer is None else size_to_train(tokenizer)
    if size is not None:
        return trained_tokenizer(folder, family, size, raw, data_dir=data_dir, progress=progress)
    if tokenizer is not None:
        return named_tokenizer(tokenizer, folder, data_dir)
    stored = tokenizer_path(folder, family)
    if stored.is_dir():
        return load_tokenizer(str(stored))
    if not raw:
        _check_not_learned(folder, family)
    loaded = load_tokenizer(tokenizer_family(family), data_dir)
    return save_family_tokenizer(loaded, folder, family) if raw else loaded


def _check_not_learned(folder: Path, family: str) -> None:
    """Raises if only trained tokenizers are saved with the tokens: their size must be given."""
    sizes = trained_sizes(folder, family)
    if sizes:
        raise ValueError(
            f"{folder} holds a vocabulary learned for {family}: add --vocabulary {' or '.join(sizes)}, or "
            "name a tokenizer by --tokenizer"
        )


def stores_in(folder: Path) -> list[TokenStore]:
    """The token stores in a folder, not yet verified."""
    if not folder.is_dir():
        return []
    folders = sorted(path.parent for path in folder.glob(f"*/{METADATA}"))
    return [TokenStore.open(path, verify=False) for path in folders if not is_unfinished(path)]


def ready_stores(folder: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, TokenStore]:
    """Token stores that this tokenizer made, by the name of their corpus, not yet verified."""
    mark = tokenizer_checksum(tokenizer)
    stores = [store for store in stores_in(folder) if store.metadata.tokenizer_checksum == mark]
    return {store.metadata.corpus: store for store in stores}


def _is_text(name: str, data_dir: str | Path | None) -> bool:
    return Path(name).exists() or (data_dir is not None and Path(data_dir, name).exists())

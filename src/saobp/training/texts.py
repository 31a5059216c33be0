"""From what the user names to rows of tokens: raw texts, or token stores that are ready."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from saobp.data import (
    Blocks,
    Documents,
    TokenStore,
    load_tokenizer,
    open_corpus,
    parse_mixture,
    prefix_of,
    prepare_corpora,
    train_vocabulary,
)
from saobp.data.tokens import DESCRIPTION, Progress
from saobp.data.vocabulary import save_tokenizer, tokenizer_checksum
from saobp.data.writing import is_unfinished, only_one, replacing

KINDS = {"bert": "wordpiece", "modernbert": "wordpiece", "gpt2": "bpe"}
ORIGIN = "learned_from.json"
"""In the folder of a learned vocabulary: the names and checksums of its texts."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+$")
"""What a dataset on the hub is called."""


@dataclass(frozen=True)
class Texts:
    """What a run reads."""

    train: Blocks
    validation: Blocks
    tokenizer: PreTrainedTokenizerFast


def find_texts(
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
) -> Texts:
    """Rows of a mixture such as ``"wikipedia_en:0.6,gutenberg_books:0.4"``.

    tokens:     folder of token stores; a corpus that can be found as text is tokenised there once, another
                must be there already. The tokenizer is left beside them, so that the folder is enough later
    corpus:     empty for all stores in that folder
    tokenizer:  a name or folder; by default the one in ``tokens``, else the family's own
    vocabulary: learn one of this size from the corpus instead
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ValueError(f"the data folder {data_dir} does not exist: check --data-dir")
    folder = Path(tokens)
    mixture = parse_mixture(corpus) if corpus else {}
    there = {store.description.corpus for store in stores_in(folder)}
    raw = [name for name in mixture if _is_text(name, data_dir) or (name not in there and _HUB.match(name))]
    if not mixture and not there:
        raise ValueError(f"{folder} holds no token store: name texts by --corpus")
    for name in mixture:
        if name not in raw and name not in there:
            raise ValueError(
                f"there is no text {name!r}"
                + ("" if data_dir is None else f" in {data_dir}")
                + f" and no token store of it in {folder}: check --corpus, --data-dir and --tokens"
            )
    words = find_tokenizer(family, folder, raw, data_dir=data_dir, tokenizer=tokenizer, vocabulary=vocabulary)
    stores = prepare_corpora(raw, words, folder, data_dir=data_dir, progress=progress) if raw else {}
    ready = ready_stores(folder, words)
    for name in mixture:
        if name not in stores and name not in ready:
            raise ValueError(
                f"the tokens of {name} in {folder} come from another tokenizer: name it by --tokenizer"
            )
    stores = {name: stores.get(name) or ready[name] for name in mixture} if mixture else ready
    if not stores:
        raise ValueError(f"{folder} holds no token store for this tokenizer: name texts by --corpus")
    weights = mixture if any(weight is not None for weight in mixture.values()) else None
    train, validation = (
        Blocks(
            stores,
            weights,
            length=length,
            seed=seed,
            split=split,
            held_out=held_out,
            prefix=None if family == "gpt2" else prefix_of(words),
        )
        for split in ("train", "validation")
    )
    return Texts(train, validation, words)


def find_tokenizer(
    family: str,
    folder: Path,
    raw: list[str],
    *,
    data_dir: str | Path | None,
    tokenizer: str | None,
    vocabulary: int | None,
) -> PreTrainedTokenizerFast:
    """The tokenizer asked for, or the one beside the tokens, or the family's; left beside the tokens."""
    beside = folder / f"tokenizer-{family}{'' if vocabulary is None else f'-{vocabulary}'}"
    if tokenizer is not None and vocabulary is not None:
        raise ValueError("give a tokenizer or the size of a vocabulary to learn, not both")
    if tokenizer is not None:
        return load_tokenizer(tokenizer, data_dir)
    if not beside.is_dir():
        if vocabulary is not None and not raw:
            raise ValueError("a vocabulary is learned from text, and no text was named by --corpus")
        if not raw:
            _check_not_learned(folder, family)
            return _family_tokenizer(family, data_dir)
        with only_one(beside):
            if not beside.is_dir():
                _leave_tokenizer(beside, family, raw, data_dir, vocabulary)
    if vocabulary is not None:
        _check_origin(beside, raw, data_dir)
    return load_tokenizer(str(beside))


def _check_not_learned(folder: Path, family: str) -> None:
    """Ask for the size where the only vocabularies beside the tokens are learned ones."""
    start = f"tokenizer-{family}-"
    sizes = sorted(path.name.removeprefix(start) for path in folder.glob(f"{start}*"))
    if sizes:
        raise ValueError(
            f"{folder} holds a vocabulary learned for {family}: add --vocabulary {' or '.join(sizes)}, or "
            "name a tokenizer by --tokenizer"
        )


def _leave_tokenizer(
    beside: Path, family: str, raw: list[str], data_dir: str | Path | None, vocabulary: int | None
) -> None:
    """Write the family's tokenizer, or one learned from the texts together with their names and checksums."""
    if vocabulary is None:
        found, origin = _family_tokenizer(family, data_dir), {}
    else:
        corpora = {name: open_corpus(name, data_dir) for name in raw}
        found = train_vocabulary(Documents(tuple(corpora.values())), vocabulary, KINDS[family])
        origin = {name: corpus.checksum for name, corpus in corpora.items()}
    with replacing(beside) as new:
        save_tokenizer(found, new)
        if origin:
            (new / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")


def _check_origin(beside: Path, raw: list[str], data_dir: str | Path | None) -> None:
    """Refuse a vocabulary that was learned from other texts than these."""
    origin = json.loads((beside / ORIGIN).read_text()) if (beside / ORIGIN).exists() else {}
    other = [name for name in raw if origin and origin.get(name) != open_corpus(name, data_dir).checksum]
    if other:
        raise ValueError(
            f"{beside} was learned from other texts than {', '.join(other)} as they are now: use it all "
            f"the same by --tokenizer {beside}, or name another folder by --tokens"
        )


def _family_tokenizer(family: str, data_dir: str | Path | None) -> PreTrainedTokenizerFast:
    return load_tokenizer("gpt2" if family == "gpt2" else "bert", data_dir)


def stores_in(folder: Path) -> list[TokenStore]:
    """The token stores in a folder, not yet verified."""
    if not folder.is_dir():
        return []
    found = sorted(path.parent for path in folder.glob(f"*/{DESCRIPTION}"))
    return [TokenStore.open(path, verify=False) for path in found if not is_unfinished(path)]


def ready_stores(folder: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, TokenStore]:
    """Token stores that this tokenizer made, by the name of their corpus; verified in full."""
    mark = tokenizer_checksum(tokenizer)
    found = [store for store in stores_in(folder) if store.description.tokenizer_checksum == mark]
    for store in found:
        store.verify()
    return {store.description.corpus: store for store in found}


def _is_text(name: str, data_dir: str | Path | None) -> bool:
    return Path(name).exists() or (data_dir is not None and Path(data_dir, name).exists())

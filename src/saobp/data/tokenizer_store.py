"""The tokenizer saved next to token stores: a family's own, or one trained on their texts.

It is written with the stores, so that training needs no other folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from saobp.data.corpora import Documents, open_corpus
from saobp.data.token_store import Progress
from saobp.data.tokenizers import HUB_NAMES, load_tokenizer, save_tokenizer, train_vocabulary
from saobp.sizes import DECODERS
from saobp.storage.atomic import replacing
from saobp.storage.json_files import read_object, write_json
from saobp.storage.locks import exclusive

ORIGIN = "learned_from.json"
"""In the folder of a learned vocabulary: the names and checksums of its texts."""
LEARNED = "train:"


def tokenizer_path(tokens: str | Path, family: str, size: int | None = None) -> Path:
    """Path of a family's tokenizer in a folder of token stores; with ``size``, of a trained one."""
    return Path(tokens, f"tokenizer-{tokenizer_family(family)}{'' if size is None else f'-{size}'}")


def tokenizer_family(family: str) -> str:
    """The family whose tokenizer a family of models uses: ModernBERT has BERT's, Llama GPT-2's."""
    return "gpt2" if family in DECODERS else "bert"


def size_to_train(tokenizer: str) -> int | None:
    """The size in ``train:SIZE``; None for any other name of a tokenizer."""
    if not tokenizer.startswith(LEARNED):
        return None
    size = tokenizer.removeprefix(LEARNED)
    if not size.isdecimal():
        raise ValueError(f"a tokenizer to train is written train:SIZE, as in train:8192, not {tokenizer!r}")
    return int(size)


def trained_sizes(tokens: str | Path, family: str) -> list[str]:
    """Sizes of the learned vocabularies in a folder of token stores."""
    start = f"{tokenizer_path(tokens, family).name}-"
    return sorted(path.name.removeprefix(start) for path in Path(tokens).glob(f"{start}*"))


def trained_tokenizer(
    tokens: str | Path,
    family: str,
    size: int,
    corpora: Collection[str],
    *,
    data_dir: str | Path | None = None,
    progress: Callable[[str], Progress] | None = None,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of ``size`` on corpora, or load it; raises if it was trained on other texts."""
    path = tokenizer_path(tokens, family, size)
    opened = {name: open_corpus(name, data_dir) for name in corpora}
    if not path.is_dir():
        if not opened:
            raise ValueError("a vocabulary is learned from text, and no text was named by --corpus")
        with exclusive(path):
            if not path.is_dir():
                texts = Documents(tuple(opened.values()))
                report = None if progress is None else progress(f"learning a vocabulary of {size:,}")
                kind = "bpe" if tokenizer_family(family) == "gpt2" else "wordpiece"
                trained = train_vocabulary(texts, size, kind, progress=report)
                _write(trained, path, {name: corpus.checksum for name, corpus in opened.items()})
    recorded = _origin(path).values()
    changed = [name for name, corpus in opened.items() if recorded and corpus.checksum not in recorded]
    if changed:
        raise ValueError(
            f"{path} was learned from other texts than {', '.join(changed)} as they are now: use it all "
            f"the same by --tokenizer {path}, or name another folder for the tokens"
        )
    return load_tokenizer(str(path))


def named_tokenizer(
    name: str, tokens: str | Path, data_dir: str | Path | None = None
) -> PreTrainedTokenizerFast:
    """A tokenizer by name; ``bert`` and ``gpt2`` from a folder of token stores, if they were saved there."""
    path = tokenizer_path(tokens, name)
    return load_tokenizer(path if name in HUB_NAMES and path.is_dir() else name, data_dir)


def save_family_tokenizer(
    tokenizer: PreTrainedTokenizerFast, tokens: str | Path, family: str
) -> PreTrainedTokenizerFast:
    """Save a family's own tokenizer into a folder of token stores unless it exists; returns the saved one."""
    path = tokenizer_path(tokens, family)
    with exclusive(path):
        if not path.is_dir():
            _write(tokenizer, path, {})
    return load_tokenizer(str(path))


def _write(tokenizer: PreTrainedTokenizerFast, path: Path, origin: dict[str, str]) -> None:
    """Atomically."""
    with replacing(path) as new:
        save_tokenizer(tokenizer, new)
        if origin:
            write_json(new / ORIGIN, origin)


def _origin(path: Path) -> dict[str, str]:
    file = path / ORIGIN
    return read_object(file) if file.exists() else {}

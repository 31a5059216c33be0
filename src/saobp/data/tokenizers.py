"""Tokenizers: BERT's and GPT-2's, one of the user's, or one trained on a corpus."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from saobp.storage.atomic import first_line, reason
from saobp.storage.model_folders import hub_problem, looks_local

PADDING, UNKNOWN, START, SEPARATOR, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END_OF_TEXT = "<|endoftext|>"
BERT_FILE = "bert-base-uncased-vocab.txt"
GPT2_FILES = ("gpt2-vocab.json", "gpt2-merges.txt")
HUB_NAMES = {"bert": "google-bert/bert-base-uncased", "gpt2": "openai-community/gpt2"}
LONGEST = {"bert": 512, "gpt2": 1024}
KINDS = ("wordpiece", "bpe")
ALPHABET = 1000
"""Size limit of a learned WordPiece alphabet, most frequent characters first."""
CHARACTERS_PER_UPDATE = 2**18
"""Characters between two progress updates."""


def load_tokenizer(name: str | Path, data_dir: str | Path | None = None) -> PreTrainedTokenizerFast:
    """``bert`` or ``gpt2`` (from ``data_dir/tokenizers``, else the hub), a folder, or a name on the hub."""
    local = None if data_dir is None else Path(data_dir, "tokenizers")
    if name == "bert" and local is not None and (local / BERT_FILE).exists():
        return _bert(local / BERT_FILE)
    if name == "gpt2" and local is not None and (local / GPT2_FILES[0]).exists():
        return _gpt2(local / GPT2_FILES[0], local / GPT2_FILES[1])
    source = HUB_NAMES.get(str(name), str(name))
    refused = None if Path(source).is_dir() or looks_local(source) else hub_problem(source)
    if refused is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except Exception as problem:
            refused = f"could not give it ({first_line(problem)})"
    if refused is not None:
        files = {"bert": BERT_FILE, "gpt2": " and ".join(GPT2_FILES)}.get(str(name))
        looked = "" if files is None or local is None else f" {local} does not hold {files}, and"
        raise ValueError(
            f"no tokenizer {str(name)!r}:{looked} it is no folder with a tokenizer and the hub {refused}; "
            "--tokenizer train:8192 learns one from the texts"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"the tokenizer {str(name)!r} is a {type(tokenizer).__name__} without a fast form, which "
            "saobp needs to tokenise whole corpora"
        )
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a tokenizer's files. Raises OSError if that fails, for instance on a full disk."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as problem:  # the tokenizers library raises nothing more specific
        raise OSError(f"the tokenizer could not be written, because {reason(problem)}") from None


def train_vocabulary(
    texts: Iterable[str],
    size: int,
    kind: str = "wordpiece",
    *,
    progress: Callable[[int, int], object] | None = None,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of ``size`` tokens: lower-case WordPiece as BERT's, or GPT-2's BPE.

    WordPiece reads texts twice, so an iterator is kept in memory; :class:`saobp.data.Documents` need not be.
    ``progress`` gets done and total, if texts have a ``size``.
    """
    if kind not in KINDS:
        raise ValueError(f"a vocabulary is one of {', '.join(KINDS)}, not {kind!r}")
    least = 257 if kind == "bpe" else len(SPECIAL) + 1
    if size < least:
        raise ValueError(f"a {kind} vocabulary has at least {least} tokens, not {size}")
    if kind == "bpe":
        counted = _Counted(texts, 1, progress)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer: Any = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(counted, trainer)
        counted.check()
        return _byte_level(tokenizer, LONGEST["bert"])
    if iter(texts) is texts:
        texts = list(texts)  # they are read twice
    counted = _Counted(texts, 2, progress)
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # Between pairs that are equally frequent the trainer goes by the numbers of their parts, given in any
    # order. Given to it in order, they make the same vocabulary each time.
    inner = [f"##{letter}" for letter in _letters(counted, tokenizer)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=[*SPECIAL, *inner], limit_alphabet=ALPHABET, show_progress=False
    )
    tokenizer.train_from_iterator(counted, trainer)
    counted.check()
    learned = sorted(set(tokenizer.get_vocab()) - set(SPECIAL))
    return _word_piece([*SPECIAL, *learned])


def _letters(texts: Iterable[str], tokenizer: Tokenizer) -> list[str]:
    """The alphabet: normalised word characters of texts, most frequent first."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    inside: Counter[str] = Counter()
    for character, times in counts.items():
        for letter in tokenizer.normalizer.normalize_str(character):
            word = f"a{letter}"
            if [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(word)] == [word]:
                inside[letter] += times
    return sorted(letter for letter, _ in inside.most_common(ALPHABET))


def separator_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token that ends a document: ``[SEP]``, or the end of text."""
    for token in (tokenizer.sep_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError("the tokenizer has neither a separator nor an end-of-text token to end documents with")


def prefix_of(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The token that every block starts with: ``[CLS]`` where there is one."""
    return None if tokenizer.cls_token_id is None else int(tokenizer.cls_token_id)


def tokenizer_text(tokenizer: PreTrainedTokenizerFast) -> str:
    """The tokenizer as JSON, without truncation or padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TypeError(
            f"a corpus is tokenised by a fast tokenizer of Transformers, not {type(tokenizer).__name__}"
        )
    if backend.truncation is None and backend.padding is None:
        return backend.to_str()
    plain = Tokenizer.from_str(backend.to_str())
    plain.no_truncation()
    plain.no_padding()
    return plain.to_str()


def tokenizer_checksum(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of the tokenizer's JSON and its separator."""
    text = f"{separator_of(tokenizer)}\n{tokenizer_text(tokenizer)}"
    return hashlib.sha256(text.encode()).hexdigest()


class _Counted:
    """Iterates over texts with progress; raises if there are none.

    They are read ``times`` times; training after the last pass counts as a tenth of the total.
    """

    def __init__(
        self, texts: Iterable[str], times: int, progress: Callable[[int, int], object] | None
    ) -> None:
        self.texts = texts
        self.found = False
        self.report = progress or (lambda *_: None)
        self.all = max(1, getattr(texts, "size", 0) * times)
        self.total = self.all + self.all // 9
        self.done = 0

    def __iter__(self) -> Iterator[str]:
        waiting = 0
        for number, text in enumerate(self.texts, 1):
            if not isinstance(text, str):
                raise TypeError(f"text {number} is of type {type(text).__name__}, not str")
            self.found = self.found or bool(text.strip())
            waiting += len(text)
            if waiting >= CHARACTERS_PER_UPDATE:
                self.done, waiting = self.done + waiting, 0
                self.report(min(self.done, self.all), self.total)
            yield text
        self.done += waiting

    def check(self) -> None:
        if not self.found:
            raise ValueError("there is no text to learn a vocabulary from")
        self.report(self.total, self.total)


def _bert(file: Path) -> PreTrainedTokenizerFast:
    tokens = file.read_text(encoding="utf-8").splitlines()
    missing = [token for token in SPECIAL if token not in tokens]
    if missing:
        raise ValueError(f"{file} is not a BERT vocabulary: it has no line {', '.join(missing)}")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{file} is not a BERT vocabulary: it names {len(tokens) - len(set(tokens))} twice")
    return _word_piece(tokens)


def _word_piece(tokens: list[str]) -> PreTrainedTokenizerFast:
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {SEPARATOR}",
        pair=f"{START} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
        special_tokens=[(START, ids[START]), (SEPARATOR, ids[SEPARATOR])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LONGEST["bert"],
        pad_token=PADDING,
        unk_token=UNKNOWN,
        cls_token=START,
        sep_token=SEPARATOR,
        mask_token=MASK,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _gpt2(vocabulary: Path, merges: Path) -> PreTrainedTokenizerFast:
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as problem:
        raise ValueError(f"{vocabulary} and {merges} are not a BPE vocabulary: {problem}") from problem
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ValueError(f"{vocabulary} has no token {END_OF_TEXT}")
    return _byte_level(tokenizer, LONGEST["gpt2"])


def _byte_level(tokenizer: Tokenizer, length: int) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=length,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
    )

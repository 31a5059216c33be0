"""The loaders on the real corpora. Slow; the folder comes from SAOBP_DATA_DIR."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from saobp.data import Blocks, load_tokenizer, open_corpus, prefix_of, prepare_tokens, word_encoder
from saobp.data.tokenizers import tokenizer_text

pytestmark = pytest.mark.slow

DOCUMENTS = {"wikipedia_en": 16_620, "gutenberg_books": 579, "imdb_reviews": 33_649, "wikitext2_raw": 600}


@pytest.fixture(scope="module")
def data_dir() -> Path:
    folder = os.environ.get("SAOBP_DATA_DIR")
    if not folder:
        pytest.skip("set SAOBP_DATA_DIR to the folder of the real corpora to run this")
    return Path(folder)


@pytest.mark.parametrize("corpus", DOCUMENTS)
def test_every_document_is_read(data_dir: Path, corpus: str) -> None:
    documents = list(open_corpus(corpus, data_dir).documents())
    assert len(documents) == DOCUMENTS[corpus]
    assert min(map(len, documents)) > 50


@pytest.mark.parametrize(("tokenizer", "size"), [("bert", 30_522), ("gpt2", 50_257)])
@pytest.mark.parametrize("corpus", DOCUMENTS)
def test_tokens_are_exactly_the_tokenizers(data_dir: Path, corpus: str, tokenizer: str, size: int) -> None:
    loaded = load_tokenizer(tokenizer, data_dir)
    assert len(loaded) == size
    number = 12 if corpus == "gutenberg_books" else 300
    documents = list(itertools.islice(open_corpus(corpus, data_dir).documents(), number))
    tokens, counts = word_encoder.CachedEncoder(tokenizer_text(loaded)).encode(documents)
    plain = [one.ids for one in loaded.backend_tokenizer.encode_batch(documents, add_special_tokens=False)]
    assert counts.tolist() == [len(ids) for ids in plain]
    assert np.array_equal(tokens, [token for ids in plain for token in ids])


def test_several_processes_make_the_same_store(data_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bert", data_dir)
    corpus = open_corpus("wikitext2_raw", data_dir)
    stores = [prepare_tokens(corpus, tokenizer, tmp_path / str(n), processes=n) for n in (1, 2)]
    assert stores[0].checksum == stores[1].checksum
    blocks = Blocks({"wikitext2_raw": stores[0]}, length=128, prefix=prefix_of(tokenizer))
    text = tokenizer.decode(blocks[0]["input_ids"])
    assert text.startswith("[CLS]")
    assert "[UNK] [UNK]" not in text

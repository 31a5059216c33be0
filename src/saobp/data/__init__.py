"""Text to packed blocks of tokens: corpora, vocabularies, token stores, blocks."""

from saobp.data.blocks import Blocks, as_it_is, held_out_documents
from saobp.data.corpora import Corpus, Documents, open_corpus, parse_mixture
from saobp.data.token_store import TokenStore, prepare_corpora, prepare_tokens
from saobp.data.tokenizers import load_tokenizer, prefix_of, separator_of, train_vocabulary

__all__ = [
    "Blocks",
    "Corpus",
    "Documents",
    "TokenStore",
    "as_it_is",
    "held_out_documents",
    "load_tokenizer",
    "open_corpus",
    "parse_mixture",
    "prefix_of",
    "prepare_corpora",
    "prepare_tokens",
    "separator_of",
    "train_vocabulary",
]

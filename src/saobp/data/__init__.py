"""Text to packed blocks of tokens: corpora, vocabularies, token stores, blocks."""

from saobp.data.blocks import Blocks, held_out_documents, identity_collate
from saobp.data.corpora import Corpus, Documents, open_corpus, parse_mixture
from saobp.data.token_store import TokenStore, prepare_corpora, prepare_tokens
from saobp.data.tokenizers import load_tokenizer, prefix_of, separator_of, train_vocabulary

__all__ = [
    "Blocks",
    "Corpus",
    "Documents",
    "TokenStore",
    "held_out_documents",
    "identity_collate",
    "load_tokenizer",
    "open_corpus",
    "parse_mixture",
    "prefix_of",
    "prepare_corpora",
    "prepare_tokens",
    "separator_of",
    "train_vocabulary",
]

"""One row against the keys and messages of a cache, as in a decoding step."""

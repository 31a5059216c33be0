"""Device functions that kernels share: indexing, prefetching, packed bfloat16, messages and loads."""

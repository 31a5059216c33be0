"""Several steps of propagation, bidirectional, in memory linear in length."""

"""Potts factors, strictly causal: sweeps on or under the diagonal, or one launch up to 128 tokens."""

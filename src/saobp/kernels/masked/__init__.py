"""Attention under a sliding window, causal or not, or the caller's mask: six sweeps, in memory linear in length."""

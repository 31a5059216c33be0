"""Attention under a sliding window or the caller's own mask, without causality: six sweeps in linear memory."""

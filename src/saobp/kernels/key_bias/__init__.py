"""Attention with a bias per key that a part of the rows sends."""

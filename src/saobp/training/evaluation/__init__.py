"""Measurements of a language model without training: perplexities, and questions asked zero-shot."""

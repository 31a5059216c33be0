"""Refined models that load without this package: their code beside the weights, and their model card."""

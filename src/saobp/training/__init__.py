"""Recipes, pretraining, and the records of runs."""

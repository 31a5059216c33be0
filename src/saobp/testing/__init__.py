"""Oracles, input makers and error budgets that tests and benchmarks share."""

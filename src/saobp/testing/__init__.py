"""What tests and benchmarks share: oracles, input makers and error budgets."""

"""Statistics of every head while a model runs, and verdicts from them."""

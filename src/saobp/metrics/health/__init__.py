"""Statistics of every head while a model runs, and what they say."""

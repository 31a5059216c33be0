"""Products with attention matrices that are never formed."""

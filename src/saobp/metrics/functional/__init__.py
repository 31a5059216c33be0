"""Statistics as functions of attention maps."""

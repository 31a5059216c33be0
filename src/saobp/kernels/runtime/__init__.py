"""Launching at little cost, custom operators, and halves of a call on two streams."""

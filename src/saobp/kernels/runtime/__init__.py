"""Launching with little overhead, custom operators, and halves of a call on two streams."""

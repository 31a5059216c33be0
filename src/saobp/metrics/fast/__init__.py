"""The fast tier: numbers of every head from one sweep over queries and keys."""

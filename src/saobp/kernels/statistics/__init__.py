"""Statistics of softmax rows from queries and keys, in one sweep without values."""

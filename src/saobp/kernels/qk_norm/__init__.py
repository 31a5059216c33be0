"""States of each head divided by their root mean square, in one pass over memory each way."""

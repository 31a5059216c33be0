"""Speed and memory on the machine at hand: timing, the tables that hold the result, and three benchmarks."""

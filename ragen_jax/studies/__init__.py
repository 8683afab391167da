"""Studies: a grid of runs with seeds, what to measure, and a verdict from the data."""

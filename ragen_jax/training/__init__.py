"""The run: what is built before the first iteration, and the loop of iterations."""

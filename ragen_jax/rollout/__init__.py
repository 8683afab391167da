"""The multi-turn sampling loop over a persistent cache."""

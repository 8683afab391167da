"""Metrics, their curves, and what the terminal shows."""

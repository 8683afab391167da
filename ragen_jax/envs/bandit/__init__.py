"""Bandit: rules and demonstrations."""

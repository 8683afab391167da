"""Countdown: rules, puzzles, texts, expressions and solver."""

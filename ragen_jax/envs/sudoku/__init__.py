"""Sudoku: rules and puzzles."""

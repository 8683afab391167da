"""Sokoban: rules, levels, texts, pictures, solver and demonstrations."""

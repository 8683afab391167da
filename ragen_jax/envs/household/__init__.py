"""Household: find things in a house, clean, heat or cool them, put them in place."""

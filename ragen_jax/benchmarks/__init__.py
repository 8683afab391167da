"""Measurements of this machine, beside other programs."""

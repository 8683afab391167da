"""Instruments that see a collapse coming: indicators, alarm, mutual information."""

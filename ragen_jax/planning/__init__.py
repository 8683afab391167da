"""Plans: memory and time of a run on devices that are not there."""

"""Plans: memory and time of a run on absent devices (launch/train.py --plan)."""

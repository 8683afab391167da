"""Analyses across the studies, for `launch/study.py --across`; none trains anything.

pool.py          the runs of all studies, each once, with their settings
numbers.py       intervals, power and corrections, and how they are written
budgets.py       comparisons at equal updates, episodes, and rate times iterations
power.py         how many seeds a difference needs
signs.py         what announces a decline
bandit_std.py    the in-group standard deviation that success on Bandit implies
shared_draws.py  what arms of a seed have in common
claims.py        how many verdicts remain if many are asked for
information.py   mutual information and success, without prompts and runs
page.py          the page of all of these
"""

"""Speed measurements on this machine, also of other libraries (launch/benchmark.py)."""

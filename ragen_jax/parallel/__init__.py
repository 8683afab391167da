"""The mesh of devices, and the processes that share it."""

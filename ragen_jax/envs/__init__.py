"""Worlds by name: what reads their settings, and what makes them."""

from ragen_jax.envs import frozen_lake

SETTINGS = {"frozen_lake": frozen_lake.FrozenLake}
WORLDS = {"frozen_lake": frozen_lake.world}  # each takes its own frozen settings

"""Worlds by name. Each make function takes its own frozen settings."""

from ragen_jax.envs import frozen_lake

WORLDS = {"frozen_lake": frozen_lake.world}

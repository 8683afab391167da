"""Solvable lakes of a split, drawn on device; RAGEN's random start, goal and holes."""

import jax
import jax.numpy as jnp

from ragen_jax.envs import base
from ragen_jax.envs.frozen_lake.planning import UNREACHABLE, distances
from ragen_jax.envs.frozen_lake.types import GOAL, HOLE, ICE, FrozenLake, State


def draw(key: jax.Array, split: jax.Array, settings: FrozenLake) -> State:
    """A solvable lake that belongs to the split.

    Args:
      key: decides the lake.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: size and probability of ice.
    """

    def draw_lake(key):
        lake = random_lake(key, settings)
        content = base.content_hash(lake.tiles, lake.player)
        return lake, (base.split_of(content) == split) & is_solvable(lake)

    # It ends: `types.check` ensures that each split has enough lakes.
    return base.draw_until_fit(draw_lake, key)


def random_lake(key: jax.Array, settings: FrozenLake) -> State:
    """One random lake, solvable or not: start and goal are any two different tiles."""
    size = settings.size
    ice_key, start_key, goal_key = jax.random.split(key, 3)
    is_ice = jax.random.bernoulli(ice_key, settings.frozen_probability, (size * size,))
    start = jax.random.randint(start_key, (), 0, size * size)
    goal = (start + jax.random.randint(goal_key, (), 1, size * size)) % (size * size)
    tile = jnp.arange(size * size)
    tiles = jnp.where(is_ice | (tile == start), ICE, HOLE)
    tiles = jnp.where(tile == goal, GOAL, tiles).astype(jnp.int32)
    return State(
        tiles=tiles.reshape(size, size),
        player=jnp.stack(jnp.divmod(start, size)).astype(jnp.int32),
        done=jnp.zeros((), bool),
    )


def is_solvable(state: State) -> jax.Array:
    """bool[], whether a path over ice leads from the player to the goal."""
    steps = distances(state.tiles != HOLE, state.player)
    return jnp.where(state.tiles == GOAL, steps, UNREACHABLE).min() < UNREACHABLE

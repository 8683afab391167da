"""PRNG keys of a rollout, derived from what is drawn and never from where it runs.

A key is a function of (seed, split, iteration) and of the group, or of the episode,
turn and token: neither slots, nor mesh, nor the order of a batch change what is drawn.
"""

import jax

_LEVELS, _ENV, _TOKENS = range(3)


def iteration_key(seed: jax.Array, split: jax.Array, iteration: jax.Array) -> jax.Array:
    """The key of one rollout (all three integers, [])."""
    key = jax.random.fold_in(jax.random.key(seed), split)
    return jax.random.fold_in(key, iteration)


def level_key(key: jax.Array, group: jax.Array) -> jax.Array:
    """The key of the initial state that all members of `group` (int32[]) share."""
    return jax.random.fold_in(jax.random.fold_in(key, _LEVELS), group)


def env_key(key: jax.Array, episode: jax.Array, turn: jax.Array) -> jax.Array:
    """The key of the environment in one turn of one episode (both int32[])."""
    key = jax.random.fold_in(jax.random.fold_in(key, _ENV), episode)
    return jax.random.fold_in(key, turn)


def token_key(
    key: jax.Array, episode: jax.Array, turn: jax.Array, token: jax.Array
) -> jax.Array:
    """The key of the `token`-th token (int32[], 0-based) sampled in one turn."""
    key = jax.random.fold_in(jax.random.fold_in(key, _TOKENS), episode)
    return jax.random.fold_in(jax.random.fold_in(key, turn), token)
